"""Which part may import which, and what the light parts must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vapo"
HEAVY = ("torch", "lightning", "transformers", "mlflow", "datasets", "torchmetrics", "mpmath")


def modules_after(statement: str) -> set[str]:
    """Names in `sys.modules` after a statement in a fresh interpreter."""
    code = f"import sys; {statement}\nprint('modules:', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.rpartition("modules:")[2].split())


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path, *, at_the_top: bool = False) -> list[str]:
    """Full names of everything a file imports, at any depth; relative imports are resolved.

    `at_the_top`: only what is imported together with the file.
    """
    return list(_imports_of(path, at_the_top=at_the_top))


def _imports_of(path: Path, *, at_the_top: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if at_the_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module_name(path).split(".")
            if path.name != "__init__.py":
                package = package[:-1]
            prefix = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*prefix, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def test_functional_imports_only_torch_jaxtyping_types_and_pure_modules() -> None:
    pure = {"collections", "dataclasses", "math", "typing", "__future__"}
    for path in sorted((PACKAGE / "functional").glob("*.py")):
        for name in imports_of(path):
            inside = name.startswith(("vapo.functional", "vapo.types")) or name == "vapo"
            assert inside or name.split(".")[0] in {"torch", "jaxtyping", *pure}, (
                f"{path.name} imports {name}"
            )


FUNCTIONAL = [p.stem for p in sorted((PACKAGE / "functional").glob("*.py"))]
EACH_ALONE = """
import importlib, os, sys
import torch, jaxtyping  # all of them load these two, which takes a second
for name in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork() == 0:
        importlib.import_module(f"vapo.functional.{name}".removesuffix(".__init__"))
        print(name, *sys.modules, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.fixture(scope="module")
def after_functional() -> dict[str, set[str]]:
    """For each file of functional/, the names in `sys.modules` once it alone is imported."""
    command = [sys.executable, "-c", EACH_ALONE, *FUNCTIONAL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: set(modules) for name, *modules in lines}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_loads_nothing_else(name: str, after_functional: dict[str, set[str]]) -> None:
    loaded = after_functional[name]
    assert f"vapo.functional.{name}".removesuffix(".__init__") in loaded
    others = {"lightning", "transformers", "omegaconf", "mlflow", "datasets", "torchmetrics"}
    assert not loaded & others
    ours = {module for module in loaded if module.split(".")[0] == "vapo"}
    assert all(m in ("vapo", "vapo.types") or m.startswith("vapo.functional") for m in ours), ours


LIGHT = (
    "import vapo.config, vapo.config.loading, vapo.config.validation, vapo.config.options",
    "import vapo.cli",
    "from vapo.cli import main; main(['fit', '--help'])",
    "from vapo.cli import main; main(['fit', '--config', 'conf/vapo.yaml', '--print_config'])",
    "from vapo.cli import main; main(['fit', '--config', 'conf/vapo.yaml', 'sede=1'])",
)


def test_config_and_command_line_are_light() -> None:
    """One after the other, in one interpreter."""
    each = (f"{statement}; print('modules:', {statement!r}, *sys.modules)" for statement in LIGHT)
    code = "\n".join(["import sys", *each])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("modules: ")]
    assert len(found) == len(LIGHT)
    for statement, line in zip(LIGHT, found, strict=True):
        rest = line.removeprefix(f"modules: {statement}")
        assert "vapo.config" in rest.split()
        assert not set(rest.split()) & set(HEAVY), statement


def loaded_with(module: str) -> set[str]:
    """All that a module's import brings along: what it and the files of ours import at the top."""
    files = {module_name(path): path for path in sources()}
    seen, left = set[str](), [module]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in files:
            left += imports_of(files[name], at_the_top=True)
    return seen


@pytest.mark.parametrize("name", ["validate", "estimate", "export", "import_model", "doctor"])
def test_commands_that_train_nothing_do_not_load_lightning(name: str) -> None:
    loaded = loaded_with(f"vapo.commands.{name}")
    assert "torch" in loaded
    assert not {module for module in loaded if module.partition(".")[0] == "lightning"}


@pytest.mark.parametrize("argv", [["--help"], ["fit", "--help"], ["export", "--help"]])
def test_help_answers_at_once(argv: list[str]) -> None:
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "vapo", *argv], cwd=ROOT, capture_output=True, check=True)
    assert time.monotonic() - start < 2.0


def test_the_engine_and_the_stages_do_not_know_the_lightning_module() -> None:
    """Only the training room, studies and commands do, and the package itself names it.

    Only the entry point imports the CLI.
    """
    for path in sources():
        inside = path.relative_to(PACKAGE)
        names = set(imports_of(path))
        if inside.name != "__main__.py":
            assert "vapo.cli" not in names, f"{inside} imports vapo.cli"
        if inside.parts[0] not in ("commands", "studies", "training", "__init__.py"):
            assert "vapo.training.module" not in names, f"{inside} imports vapo.training.module"


def test_experiments_are_not_imported() -> None:
    for path in sources():
        assert not any(n.split(".")[0] in ("experiments", "tests") for n in imports_of(path)), path
