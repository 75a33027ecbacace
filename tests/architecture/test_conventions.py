"""Conventions that a reader relies on, proved over the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "vapo"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LOADERS = ("from_pretrained", "from_config")


@cache
def marks(path: Path) -> frozenset[str]:
    """What the tests look for in a file, which is parsed once for all of them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found_in = (marks_of, ways_to_start)
    return frozenset(mark for node in ast.walk(tree) for find in found_in for mark in find(node))


def marks_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and node.attr == "enabled":
        yield "reads enabled"
    elif isinstance(node, ast.Call):
        yield from marks_of_call(node, getattr(node.func, "id", ""))
    elif isinstance(node, ast.Import):
        yield from (f"imports {alias.name.split('.')[0]}" for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield f"imports {(node.module or '').split('.')[0]}"


def marks_of_call(node: ast.Call, function: str) -> Iterator[str]:
    if function in ("print", "eval", "exec", "compile", "__import__"):
        yield f"calls {function}"
    if function == "getattr" and any(
        isinstance(a, ast.Constant) and a.value == "enabled" for a in node.args
    ):
        yield "reads enabled"
    needed = {"trust_remote_code": False, "weights_only": True, "shell": False}
    for keyword in node.keywords:
        wanted = needed.get(keyword.arg or "")
        if wanted is not None and getattr(keyword.value, "value", None) is not wanted:
            yield f"another {keyword.arg}"


def with_mark(mark: str) -> set[str]:
    return {str(path.relative_to(PACKAGE)) for path in SOURCES if mark in marks(path)}


def test_no_grab_bag_files() -> None:
    names = {"utils.py", "util.py", "base.py", "helpers.py", "common.py", "misc.py"}
    assert not [path for path in SOURCES if path.name in names]


def test_everything_is_printed_without_what_a_terminal_acts_on() -> None:
    """By `say`, which escapes it; a user's traceback goes to a pipe, whose reader escapes it."""
    assert with_mark("calls print") == {"errors/shown_text.py", "user_code/process_protocol.py"}


def test_only_resolve_reads_enabled() -> None:
    """And what says which keys a switch leaves unread."""
    assert with_mark("reads enabled") == {"config/hyperparameters.py", "config/unread_changes.py"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_runs_foreign_code(path: Path) -> None:
    picklers = {"pickle", "dill", "joblib", "cloudpickle"}
    if path.relative_to(PACKAGE).as_posix() == "user_code/handed_functions.py":
        picklers.remove("cloudpickle")  # from a process to its own child
    refused = {f"imports {name}" for name in picklers}
    refused |= {f"calls {name}" for name in ("eval", "exec", "compile", "__import__")}
    refused |= {f"another {name}" for name in ("trust_remote_code", "weights_only", "shell")}
    assert not marks(path) & refused


def _loads_without_a_word_on_code(path: Path) -> Iterator[str]:
    """Each use of a transformers loader that is no call with `trust_remote_code=False` in words.

    A loader that is only passed on, or named in a string, is one too: nobody can see its call.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    explicit = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(
            keyword.arg == "trust_remote_code" and getattr(keyword.value, "value", None) is False
            for keyword in node.keywords
        )
    }
    for node in ast.walk(tree):
        is_name = isinstance(node, ast.Constant) and node.value in LOADERS
        is_use = isinstance(node, ast.Attribute) and node.attr in LOADERS
        is_use = is_use or (isinstance(node, ast.Name) and node.id == "pipeline")
        if is_name or (is_use and id(node) not in explicit):
            yield f"{path.name}:{getattr(node, 'lineno', 0)}"


@pytest.mark.parametrize("folder", ["vapo", "experiments"])
def test_every_loader_says_that_it_runs_no_code_of_the_model(folder: str) -> None:
    """Left out, transformers asks at a terminal whether to run the folder's code."""
    paths = sorted((PACKAGE.parent / folder).rglob("*.py"))
    assert paths
    assert not [found for path in paths for found in _loads_without_a_word_on_code(path)]


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("AutoConfig.from_pretrained(path)", True),
        ("AutoModel.from_config(config, **options)", True),
        ("AutoTokenizer.from_pretrained(path, trust_remote_code=trusts)", True),
        ("load = GenerationConfig.from_pretrained", True),
        ("getattr(AutoModel, 'from_pretrained')(path)", True),
        ("AutoModel.from_pretrained(path, trust_remote_code=False)", False),
    ],
)
def test_the_search_finds_each_kind_of_use(tmp_path: Path, line: str, is_found: bool) -> None:
    source = tmp_path / "source.py"
    source.write_text(line)
    assert bool(list(_loads_without_a_word_on_code(source))) is is_found


def test_losses_have_no_denominator_of_their_own() -> None:
    """A `.mean()` in a loss would weigh micro-batches wrongly; denominators are passed in."""
    tree = ast.parse((PACKAGE / "functional" / "losses.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        assert not (isinstance(node, ast.Attribute) and node.attr == "mean"), node.lineno


NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IN_SEVERAL_FILES = {  # name -> in how many; `run` is what any command's file does
    "option": 2,  # of the config, and of the command line
    "load_config": 2,  # vapo.load_config, and what it calls
    "ValuePretraining": 2,  # the component's keys, and the callback that runs it
    "markdown": 3,  # a study's report, in each form
    "as_csv": 2,
    "figure": 2,
    "oracle_states": 3,  # of a task, as a user's may have it beside its generator
}


def test_a_public_name_stands_in_one_file() -> None:
    """Who searches for it finds one thing."""
    files: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, NAMED) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {path.partition("/")[0] for path in files.pop("run")} == {"commands"}
    several = {name: len(found) for name, found in files.items() if len(found) > 1}
    assert several == IN_SEVERAL_FILES, {name: files[name] for name in several}


# How a Python process may come about: each of these would look into the current folder first.
STARTS_PYTHON = {
    "sys.executable": ("import sys\nsys.executable", "from sys import executable"),
    "-m or -c": ("command = [python, '-m', 'x']", "run(('python3', '-c', 'import b'))"),
    "multiprocessing": (
        "from multiprocessing import Process",
        "import multiprocessing",
        "from concurrent.futures import ProcessPoolExecutor",
        "import concurrent.futures.process",
        "from torch.multiprocessing import spawn",
        "import torch.multiprocessing as mp",
    ),
    "a command line as text": ("os.system('python -m x')", "import os\nos.popen(text)"),
}
SPAWNS = ("multiprocessing", "torch.multiprocessing", "concurrent.futures.process")
NO_PROCESS = ("multiprocessing.connection", "multiprocessing.reduction")
LAST_NAMES = ("executable", "system", "popen", "ProcessPoolExecutor", "multiprocessing", "process")


def ways_to_start(node: ast.AST) -> Iterator[str]:
    """The ways in which a part of a file starts a Python process by itself."""
    names: list[str] = []
    if isinstance(node, ast.Attribute) and node.attr in LAST_NAMES:
        names = [ast.unparse(node)]
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, (ast.List, ast.Tuple)):
        words = {item.value for item in node.elts if isinstance(item, ast.Constant)}
        if {"-m", "-c"} & words and "-P" not in words:
            yield "-m or -c"
    for name in names:
        if name == "sys.executable":
            yield "sys.executable"
        elif name in ("os.system", "os.popen"):
            yield "a command line as text"
        elif name.endswith(".ProcessPoolExecutor") or (
            name.startswith(SPAWNS) and not name.startswith(NO_PROCESS)
        ):
            yield "multiprocessing"


def test_one_file_starts_python() -> None:
    """`user_code/python_child.py`: a process that starts in another way reads the user's files."""
    starting = {path for way in STARTS_PYTHON for path in with_mark(way)}
    assert starting == {"user_code/python_child.py"}


@pytest.mark.parametrize(
    ("way", "line"), [(way, line) for way, lines in STARTS_PYTHON.items() for line in lines]
)
def test_the_search_finds_each_way_to_start_python(way: str, line: str) -> None:
    assert {way for node in ast.walk(ast.parse(line)) for way in ways_to_start(node)} == {way}


def read_by_position(path: Path) -> Iterator[str]:
    """Where the answer of an actor or a critic is unpacked, indexed or sliced."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        is_unpacked = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
        is_read = is_unpacked or isinstance(node, (ast.Subscript, ast.Starred))
        answer = getattr(node, "value", None) if is_read else None
        if isinstance(answer, ast.Call):
            function = answer.func.func if isinstance(answer.func, ast.Call) else answer.func
            name = getattr(function, "id", getattr(function, "attr", ""))
            if name.lower() in ("actor", "critic", "network", "reference", "forward_of_rows"):
                yield f"{path}:{answer.lineno}"


def test_what_networks_say_is_read_by_the_names_of_its_fields() -> None:
    """A field more would break who unpacks it, maybe on a machine that no test runs on."""
    root = PACKAGE.parent
    files = [p for room in ("vapo", "tests", "experiments") for p in (root / room).rglob("*.py")]
    asking = [p for p in files if "temperature=" in p.read_text(encoding="utf-8")]
    assert not [place for path in asking for place in read_by_position(path)]
