"""Where a user's function is looked for, what each error says, and what reaches a worker."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.config.fits import MINIMAL, ROOT, write
from tests.user_code.modules_of_users import imports_are_undone  # noqa: F401
from vapo.commands.python_values import as_overrides
from vapo.config import FitConfig
from vapo.config.data import Mixture
from vapo.config.loading import compose, from_yaml, load_config
from vapo.config.rewards import PythonVerifier
from vapo.config.written import config_hash, to_yaml
from vapo.errors import UserError
from vapo.rewards.text_judge import WorkerPool
from vapo.rewards.verifier_code import VerifierCode, make_python
from vapo.rewards.verifiers import Judgement
from vapo.sweep.grid import read_grid
from vapo.sweep.plan import compose_rows
from vapo.user_code import handed_functions, user_functions
from vapo.user_code.function_files import check_function
from vapo.user_code.handed_functions import bytes_of, function_path
from vapo.user_code.user_functions import import_function

KEY = "rewards.function"
HERE, THERE = "def score(*_):\n    return True\n", "def score(*_):\n    return False\n"


pytestmark = pytest.mark.usefixtures("imports_are_undone")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A project's folder, and the current one."""
    project, current = tmp_path / "project", tmp_path / "current"
    for folder in (project, current):
        folder.mkdir()
    monkeypatch.chdir(current)
    return project, current


def composed(project: Path, rewards: str, *overrides: str) -> FitConfig:
    files = [write(project, MINIMAL, "0.yaml"), write(project, f"rewards: {rewards}", "my.yaml")]
    return compose(FitConfig, files, list(overrides)).config


def verdict(config: FitConfig) -> object:
    """What the config's function says, in a worker process."""
    own = config.rewards
    assert isinstance(own, PythonVerifier)
    code = VerifierCode(kind="python", function=own.function, function_folder=own.function_folder)
    return judged(code)


def judged(code: VerifierCode) -> object:
    replies = []
    pool = WorkerPool(code, num_workers=1, timeout_s=5.0)
    try:
        pool.run([("text", "answer", {})], lambda index, reply: replies.append(reply))
    finally:
        pool.close()
    return replies[0].get("is_correct", replies[0])


def test_beside_the_yaml_then_in_the_current_folder(folders: tuple[Path, Path]) -> None:
    project, current = folders
    write(current, HERE, "mine_a.py")
    config = composed(project, "{verifier: python, function: 'mine_a:score'}")
    assert verdict(config) is True
    write(project, THERE, "mine_a.py")
    assert verdict(config) is False
    write(project, "rewards: {verifier: python, function: 'mine_a:score'}\n", "base.yaml")
    on_top = [current / "0.yaml", write(current, "extends: ../project/base.yaml\n", "top.yaml")]
    write(current, MINIMAL, "0.yaml")
    assert verdict(compose(FitConfig, on_top, []).config) is False, "of the file that is extended"
    by_hand = composed(project, "{verifier: python}", f"{KEY}=mine_a:score")
    assert verdict(by_hand) is True, "typed on the command line: the current folder's"


@pytest.mark.parametrize("name", ["deep/mine_b.py:score", "mine_c:score"])
def test_what_a_run_records_is_found_from_another_folder(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    project, current = folders
    (project / "deep").mkdir()
    write(project / "deep", "from mine_helper import score\n", "mine_b.py")
    write(project / "deep", THERE, "mine_helper.py")
    write(project, THERE, "mine_c.py")
    config = composed(project, f"{{verifier: python, function: '{name}'}}")
    monkeypatch.chdir("/")
    again = from_yaml(FitConfig, to_yaml(config), source="a checkpoint's config")
    assert again == config
    assert verdict(again) is False
    recorded = compose(FitConfig, [write(current, to_yaml(config), "config.yaml")], []).config
    assert recorded == config


def test_a_file_is_named_absolutely_or_from_the_yaml_or_from_here(
    folders: tuple[Path, Path],
) -> None:
    project, current = folders
    write(current, HERE, "my-file.py")
    own = "{verifier: python, function: 'my-file.py:score'}"
    assert verdict(composed(project, own)) is True
    write(project, THERE, "my-file.py")
    assert verdict(composed(project, own)) is False
    file = current / "my-file.py"
    assert verdict(composed(project, own, f"{KEY}={file}:score")) is True


def test_the_layer_that_names_the_function_decides_the_folder(folders: tuple[Path, Path]) -> None:
    project, current = folders
    recorded = f"{{verifier: python, function: 'mine_d:f', function_folder: {project}}}"
    for overrides, folder in (
        ([], project),
        ([f"{KEY}=mine_d:g"], current),
        ([f"{KEY}=mine_d:g", f"{KEY}_folder=sub"], current / "sub"),
        ([f"{KEY}_folder=/"], Path("/")),
    ):
        rewards = composed(current, recorded, *overrides).rewards
        assert isinstance(rewards, PythonVerifier)
        assert rewards.function_folder == str(folder)
    relative = composed(project, "{verifier: python, function: 'a:f', function_folder: sub}")
    assert isinstance(relative.rewards, PythonVerifier)
    assert relative.rewards.function_folder == str(project / "sub")
    assert composed(project, "{}").critic.head_function_folder is None


def test_a_moved_project_is_the_same_run(folders: tuple[Path, Path]) -> None:
    own = "{verifier: python, function: 'mine_d:f'}"
    one, other = (composed(folder, own) for folder in folders)
    assert one != other
    assert config_hash(one) == config_hash(other)


def test_a_sources_own_function_and_a_sweeps_row(folders: tuple[Path, Path]) -> None:
    project, current = folders
    source = "{path: a.jsonl, verifier: python, function: 'mine_e:score'}"
    files = [write(current, MINIMAL, "0.yaml")]
    files.append(
        write(project, f"data: {{train: {{kind: mixture, sources: {{a: {source}}}}}}}", "mix.yaml")
    )
    train = compose(FitConfig, files, []).config.data.train
    assert isinstance(train, Mixture)
    assert vars(train.sources["a"])["function_folder"] == str(project)
    rows = "rows:\n- row: own\n  overrides: {rewards.verifier: python, rewards.function: 'm:f'}\n"
    grid = read_grid(write(project, rows, "grid.yaml"))
    (config,) = compose_rows(grid, files[:1], [])[1].values()
    assert vars(config.rewards)["function_folder"] == str(project)


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (HERE, "mine_n:score", ["no module mine_n", "{project}", "{current}", "python3"]),
        (HERE, "mine_n:score", ["did you mean {project}/mine_f.py?"]),
        (HERE, "gone/mine_f.py:score", ["{project}/gone/mine_f.py, {current}/gone/mine_f.py"]),
        (HERE, "mine_f:scor", ["mine_f.py has no function scor; did you mean score?; its"]),
        (HERE, "mine_f.py:other", ["{project}/mine_f.py has no function other; its functions: s"]),
        ("x = 1\n1 / 0\n", "mine_f:score", ["ZeroDivisionError: division", "/mine_f.py:2)"]),
        ("\nimport gone_too\n", "mine_f:score", ["No module named 'gone_too'", "/mine_f.py:2)"]),
        ("import json\njson.loads('')\n", "mine_f.py:score", ["JSONDecodeError", "mine_f.py:2)"]),
        ("def score(:\n", "mine_f:score", ["SyntaxError: invalid syntax", "/mine_f.py:1)"]),
        ("raise SystemExit(3)\n", "mine_f:score", ["SystemExit: 3", "/mine_f.py:1)"]),
        ("score = 3\n", "mine_f:score", ["is int, not a function"]),
        (HERE, "mine_f.sub:score", ["mine_f", "has no module sub"]),
        (HERE, "__main__:score", ["notebook or script that was started has no function score"]),
    ],
)
def test_an_error_says_where_and_what(
    folders: tuple[Path, Path], text: str, name: str, said: list[str]
) -> None:
    project, current = folders
    write(project, text, "mine_f.py")
    with pytest.raises(UserError) as caught:
        import_function(name, key=KEY, folder=str(project))
    message = str(caught.value)
    assert message.startswith(f"{KEY}: ")
    assert "\n" not in message
    for part in said:
        assert part.format(project=project, current=current) in message


def test_another_module_of_the_name_is_not_taken_for_it(folders: tuple[Path, Path]) -> None:
    project, current = folders
    write(current, HERE, "mine_g.py")
    write(project, THERE, "mine_g.py")
    assert import_function("mine_g:score", key=KEY)() is True
    with pytest.raises(UserError, match=r"already imported another .*: name the file, as .*:func"):
        import_function("mine_g:score", key=KEY, folder=str(project))
    assert import_function("mine_g.py:score", key=KEY, folder=str(project))() is False


def test_a_folder_hides_no_file_and_pythons_own_modules_stay(folders: tuple[Path, Path]) -> None:
    project, current = folders
    (current / "mine_h").mkdir()
    write(project, THERE, "mine_h.py")
    write(project, "raise ValueError\n", "random.py")
    assert import_function("mine_h:score", key=KEY, folder=str(project))() is False
    assert import_function("random:random", key=KEY, folder=str(project))() < 1


def test_a_function_of_a_script_reaches_the_workers(tmp_path: Path) -> None:
    """The script is not run once more in the worker: it has no guard."""
    script = """
        import math
        from vapo.rewards.verifier_code import VerifierCode
        from vapo.rewards.text_judge import WorkerPool
        from vapo.user_code.handed_functions import bytes_of, function_path

        print("started")
        FACTOR = 2

        def helper(text):
            return math.floor(len(text) * FACTOR)

        def score(text, answer, metadata):
            return helper(text) == 8

        path = function_path(score, key="k")
        sent = bytes_of(path, key="k")
        code = VerifierCode(kind="python", function=path, function_bytes=sent)
        pool = WorkerPool(code, num_workers=1, timeout_s=5.0)
        pool.run([("text", "answer", {})], lambda _, reply: print(path, reply["is_correct"]))
        pool.close()
    """
    file = write(tmp_path, dedent(script), "script.py")
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.split("\n") == ["started", "__main__:score True", ""], done.stderr


def test_what_cannot_be_sent_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert function_path(write, key=KEY) == "tests.config.fits:write"
    lock = threading.Lock()
    with pytest.raises(UserError, match=r"lambda cannot be sent to the worker processes \(TypeErr"):
        function_path(lambda *_: lock, key=KEY)
    monkeypatch.setattr(sys.modules["__main__"], "held", lambda *_: lock, raising=False)
    with pytest.raises(UserError, match=r"__main__:held cannot be sent to the worker processes"):
        bytes_of("__main__:held", key=KEY)
    assert bytes_of("tests.config.fits:write", key=KEY) is None


def test_the_lookup_is_light() -> None:
    code = (
        "import sys\nfrom vapo.user_code.user_functions import import_function\n"
        "import_function('json:dumps', key='k')\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


class Judge:
    """An object that judges, by a call or by its methods."""

    def __init__(self, most: int = 2) -> None:
        self.most = most

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> bool:
        return len(text) <= self.most

    def method(self, text: str, answer: str, metadata: Mapping[str, Any]) -> bool:
        return len(text) <= self.most

    @classmethod
    def of_class(cls, text: str, answer: str, metadata: Mapping[str, Any]) -> bool:
        return len(text) <= 2

    @staticmethod
    def static(text: str, answer: str, metadata: Mapping[str, Any]) -> bool:
        return len(text) <= 2


def within(most: int, text: str, answer: str, metadata: Mapping[str, Any]) -> bool:
    return len(text) <= most


def by_name(*, response_text: str, answer: str, metadata: Mapping[str, Any]) -> bool:
    assert (answer, metadata) == ("a", {"m": 1})
    return len(response_text) <= 2


def half_by_name(text: str, *, metadata: Mapping[str, Any], answer: str = "") -> bool:
    return by_name(response_text=text, answer=answer, metadata=metadata)


def anything(**given: Any) -> bool:
    return by_name(**given)


def answer_bound(response_text: str, answer: str, metadata: Mapping[str, Any]) -> bool:
    assert (answer, metadata) == ("own", {"m": 1})
    return len(response_text) <= 2


@functools.lru_cache
def cached(text: str, answer: str, metadata: Any) -> bool:
    return len(text) <= 2


def verl(solution_str: str, ground_truth: str, most: int) -> float:
    return float(len(solution_str) <= most)


def trl(completions: list[str], most: int, **_: Any) -> list[float]:
    return [float(len(text) <= most) for text in completions]


def local() -> Callable[..., Any]:
    def judge(text: str, answer: str, metadata: Any) -> bool:
        return len(text) <= 2

    return judge


HERE_NAME = f"{__name__}:"
CALLABLES: list[tuple[Callable[..., Any], str]] = [
    (functools.partial(within, 2), "__handed__:within(2)"),
    (functools.partial(answer_bound, answer="own"), "__handed__:answer_bound(answer=own)"),
    (functools.partial(functools.partial(within), 2), "__handed__:within(2)"),
    (functools.partial(verl, most=2), "__handed__:verl(most=2)"),
    (functools.partial(trl, most=2), "__handed__:trl(most=2)"),
    (functools.partial(Judge(), metadata={}), "__handed__:Judge(metadata=dict)"),
    (Judge(), "__handed__:Judge"),
    (Judge().method, "__handed__:Judge.method"),
    (Judge().__call__, "__handed__:Judge.__call__"),
    (Judge.of_class, f"{HERE_NAME}Judge.of_class"),
    (Judge.static, f"{HERE_NAME}Judge.static"),
    (lambda text, answer, metadata: len(text) <= 2, "__handed__:lambda"),
    (local(), "__handed__:judge"),
    (by_name, f"{HERE_NAME}by_name"),
    (half_by_name, f"{HERE_NAME}half_by_name"),
    (anything, f"{HERE_NAME}anything"),
]


@pytest.fixture
def nothing_handed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_functions, "handed", {})
    monkeypatch.setattr(handed_functions, "handed", user_functions.handed)


@pytest.mark.usefixtures("nothing_handed")
@pytest.mark.parametrize(("given", "path"), CALLABLES, ids=[path for _, path in CALLABLES])
def test_whatever_can_be_called_judges(given: Callable[..., Any], path: str) -> None:
    config = load_config(
        FitConfig,
        [ROOT / "conf/vapo.yaml"],
        as_overrides({"rewards.verifier": "python", "rewards.function": given}),
    )
    assert vars(config.rewards)["function"] == path
    again = from_yaml(FitConfig, to_yaml(config), source="recorded")
    assert vars(again.rewards)["function"] == path
    check_function(path, key=KEY)
    sent = bytes_of(path, key=KEY)
    user_functions.handed.clear()  # a worker was handed nothing
    judge = make_python(path, function_bytes=sent)
    assert [judge(text, "a", {"m": 1}).is_correct for text in ("ok", "not")] == [True, False]


def test_a_function_behind_a_cache_has_its_name() -> None:
    assert function_path(cached, key=KEY) == f"{HERE_NAME}cached"
    assert function_path(len, key=KEY) == "builtins:len"
    assert function_path("x".startswith, key=KEY) == "__handed__:str.startswith"
    assert import_function("builtins:len", key=KEY) is len


@pytest.mark.usefixtures("nothing_handed")
def test_names_are_of_what_is_behind_them() -> None:
    """Made again, it is the same; of other code or values it has another name."""
    first, other = Judge(2), Judge(3)
    assert function_path(first, key=KEY) == function_path(first, key=KEY) == "__handed__:Judge"
    assert function_path(Judge(2), key=KEY) == "__handed__:Judge"
    assert function_path(other, key=KEY) == "__handed__:Judge_2"
    assert function_path(Judge(3), key=KEY) == "__handed__:Judge_2"
    assert import_function("__handed__:Judge_2", key=KEY)("three"[:3], "", {})
    assert function_path(lambda: "a: b # c", key=KEY) == "__handed__:lambda"
    odd = functools.partial(print, sep="a: b # {c}")
    assert function_path(odd, key=KEY) == "__handed__:print(sep=a__b____c_)"
    user_functions.handed.clear()
    for look in (import_function, check_function):
        with pytest.raises(
            UserError, match=f"{KEY}: __handed__:Judge was handed over by a Python pro"
        ):
            look("__handed__:Judge", key=KEY)


def test_a_class_is_no_reward_and_may_be_an_environment() -> None:
    for given in (Judge, dict):
        with pytest.raises(UserError, match=f"{KEY}: .* is a class, not a Python function: write"):
            function_path(given, key=KEY)
    assert function_path(Judge, key="environment.function") == f"{HERE_NAME}Judge"


async def waits(text: str, answer: str, metadata: Any) -> bool:
    return True


async def yields(text: str, answer: str, metadata: Any) -> AsyncIterator[bool]:
    yield True


class Waiting:
    async def __call__(self, text: str, answer: str, metadata: Any) -> bool:
        return True

    async def method(self, text: str, answer: str, metadata: Any) -> bool:
        return True


@pytest.mark.parametrize(
    "given",
    [
        waits,
        Waiting(),
        Waiting().method,
        Waiting().__call__,
        functools.partial(waits, metadata=1),
        functools.partial(functools.partial(Waiting()), metadata=1),
        functools.partial(Waiting().method),
    ],
    ids=map(str, range(7)),  # the text of a function has its address, another in each process
)
def test_a_coroutine_function_is_waited_for_in_every_wrapping(given: Callable[..., Any]) -> None:
    path = function_path(given, key=KEY)
    verifier = make_python(path, function_bytes=bytes_of(path, key=KEY))
    assert verifier("text", "answer", {}) == Judgement(True)


def test_a_generator_is_refused() -> None:
    path = function_path(yields, key=KEY)
    with pytest.raises(UserError, match="is a generator: write a function that returns"):
        make_python(path, function_bytes=bytes_of(path, key=KEY))


@pytest.mark.parametrize(
    "given",
    [lambda text: True, functools.partial(within, most=2), local],
    ids=["lambda", "partial", "local"],
)
def test_what_does_not_take_its_arguments_is_refused(given: Callable[..., Any]) -> None:
    path = function_path(given, key=KEY)
    with pytest.raises(UserError, match=r"cannot be called with \(response_text, answer, metadata"):
        make_python(path, function_bytes=bytes_of(path, key=KEY))


def test_what_a_script_has_in_hand_reaches_the_workers(tmp_path: Path) -> None:
    """Beside the script lies a module, which the workers import."""
    write(tmp_path, "def long(most, text):\n    return len(text) > most\n", "mine_beside.py")
    script = """
        import functools
        import mine_beside
        from vapo.rewards.verifier_code import VerifierCode
        from vapo.rewards.text_judge import WorkerPool
        from vapo.user_code.handed_functions import bytes_of, function_path

        class Judge:
            def __init__(self, part):
                self.part = part

            def __call__(self, text, answer, metadata):
                return self.part(text)

        path = function_path(Judge(functools.partial(mine_beside.long, 3)), key="k")
        code = VerifierCode(kind="python", function=path, function_bytes=bytes_of(path, key="k"))
        pool = WorkerPool(code, num_workers=1, timeout_s=5.0)
        pool.run([("text", "answer", {})], lambda _, reply: print(path, reply["is_correct"]))
        pool.close()
    """
    file = write(tmp_path, dedent(script), "script.py")
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout == "__handed__:Judge True\n", done.stderr
