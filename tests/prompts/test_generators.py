"""A user's own generator of rows, and the functions that may stand beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.config.fits import ROOT
from tests.networks.chat_tokenizers import chat_tokenizer, ids_of, text_of
from tests.user_code.modules_of_users import imports_are_undone  # noqa: F401
from vapo.commands.file_checks import check_sources
from vapo.config import FitConfig
from vapo.config.data import FunctionSource, sources_of
from vapo.config.loading import load_config
from vapo.diagnostics.oracle import oracle_of
from vapo.diagnostics.value_truth.measure import is_marked_wrong
from vapo.errors import UserError
from vapo.prompts.generators import functions_beside_generators
from vapo.prompts.sources import read_rows
from vapo.types import FinishReason, Prompt, Rollout

SUMS = """
def sums(num_examples, *, seed, step=1, is_long=False, note="none"):
    for i in range(num_examples):
        total = seed + step * i
        yield {"prompt": f"{seed}+{step * i}=", "answer": total, "demonstration": str(total),
               "note": note}


def oracle_states(problem, response):
    return None if problem == "?" else [f"{problem}{i}" for i in range(len(response) + 1)]


def marks_step_wrong(response):
    return {"-": True, "+": False}.get(response[-1:])
"""
OVERLAY = """
data:
  train: {kind: generated, generator_function: "mine_tasks.py:sums", num_examples: 3, seed: 4}
"""


pytestmark = pytest.mark.usefixtures("imports_are_undone")


def config_of(folder: Path, code: str = SUMS, *overrides: str, overlay: str = OVERLAY) -> FitConfig:
    (folder / "mine_tasks.py").write_text(code)
    (folder / "mine.yaml").write_text(overlay)
    return load_config(FitConfig, [ROOT / "conf/vapo.yaml", folder / "mine.yaml"], overrides)


def train(config: FitConfig) -> FunctionSource:
    source = sources_of(config.data, "train")["data.train"]
    assert isinstance(source, FunctionSource)
    return source


def test_rows_are_those_that_the_function_returns(tmp_path: Path) -> None:
    """The function is looked for beside the YAML file; options of the other task are dropped."""
    config = config_of(tmp_path, SUMS, "data.train.options={step: 10, note: x}")
    rows = read_rows(train(config), key="data.train")
    assert [(row.problem, row.answer, row.demonstration) for row in rows] == [
        ("4+0=", "4", "4"),
        ("4+10=", "14", "14"),
        ("4+20=", "24", "24"),
    ]
    assert rows[1].place == "mine_tasks.py:sums[seed 4]: row 2"
    assert rows[1].metadata == {"note": "x"}


@pytest.mark.parametrize(
    ("body", "options", "message"),
    [
        ("", "{stepp: 2}", r"options\.stepp: the task mine_tasks.py:sums has no .* mean 'step'"),
        ("", "{step: 2.5}", r"^data\.train\.options\.step is 2\.5: give a whole number"),
        ("", "{is_long: 1}", r"^data\.train\.options\.is_long is 1: give true or false"),
        ("return [{}] * 3", "{}", r"generator_function mine_tasks.py:sums: row 1 is \{\}: each"),
        ("return ['x'] * 3", "{}", r"row 1 is 'x': each row must be a dict with `prompt` and"),
        ("return []", "{}", r"returned 0 rows, fewer than data\.train\.num_examples, 3"),
        ("return None", "{}", r"generator_function mine_tasks.py:sums raised TypeError"),
        ("1 / 0", "{}", r"raised ZeroDivisionError: division by zero \(mine_tasks.py:2\)"),
    ],
)
def test_what_a_generator_does_wrong_is_one_error(
    tmp_path: Path, body: str, options: str, message: str
) -> None:
    head = 'def sums(num_examples, *, seed, step=1, is_long=False, note="none"):\n    '
    config = config_of(tmp_path, head + (body or "return []"), f"data.train.options={options}")
    with pytest.raises(UserError, match=message):
        read_rows(train(config), key="data.train")


def test_arguments_that_it_does_not_take_are_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, "def sums(num_examples):\n    return []")
    with pytest.raises(UserError, match=r"sums cannot be called with \(num_examples, seed=\.\.\."):
        read_rows(train(config), key="data.train")


def test_the_check_before_torch_reads_its_file_and_runs_nothing(tmp_path: Path) -> None:
    check_sources(config_of(tmp_path, "1 / 0\n" + SUMS))
    with pytest.raises(UserError, match=r"generator_function: .* has no sums; did you mean sum\?"):
        check_sources(config_of(tmp_path, "def sum(): ..."))


def rollout(problem: str, response: str, source: str = "") -> Rollout:
    ids = tuple(ids_of(response, chat_tokenizer("mistral")))
    prompt = Prompt("p", problem, (1,), "4", source=source, record={"prompt": problem})
    return Rollout(prompt, ids, response, (0.0,) * len(ids), FinishReason.LENGTH)


def test_states_and_marks_of_a_user_s_task_are_read(tmp_path: Path) -> None:
    config, tokenizer = config_of(tmp_path), chat_tokenizer("mistral")
    assert text_of(ids_of("1+-", tokenizer)[:2], tokenizer) == "1+"
    oracle = oracle_of(config, tokenizer)
    assert oracle(rollout("4+0=", "1+-")) == ["4+0=0", "4+0=1", "4+0=2"]
    assert oracle(rollout("?", "1+-")) is None
    marks = functions_beside_generators(config.data, "marks_step_wrong")
    found = [is_marked_wrong(marks, rollout("4+0=", "1+-"), n, tokenizer) for n in (1, 2, 3)]
    assert found == [None, False, True]


def test_a_task_without_them_has_neither(tmp_path: Path) -> None:
    config = config_of(tmp_path, "def sums(num_examples, *, seed): ...")
    assert functions_beside_generators(config.data, "oracle_states") == {}
    assert oracle_of(config, chat_tokenizer("mistral"))(rollout("4+0=", "1+-")) is None


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ("['a']", r"oracle_states must return a list with a text for each of the 4 prefixes"),
        ("[0, 1, 2, 3]", r"oracle_states must return a list with a text for each of the 4 pre"),
        ("1 / 0", r"oracle_states raised ZeroDivisionError: division by zero \(mine_tasks.py:3\)"),
    ],
)
def test_states_that_are_none_are_one_error(tmp_path: Path, states: str, message: str) -> None:
    code = "def sums(num_examples, *, seed): ...\ndef oracle_states(problem, response):\n"
    config = config_of(tmp_path, f"{code}    return {states}")
    with pytest.raises(UserError, match=message):
        oracle_of(config, chat_tokenizer("mistral"))(rollout("4+0=", "1+-"))


def test_a_mark_is_true_false_or_none(tmp_path: Path) -> None:
    code = "def sums(num_examples, *, seed): ...\ndef marks_step_wrong(response):\n    return 'no'"
    marks = functions_beside_generators(config_of(tmp_path, code).data, "marks_step_wrong")
    with pytest.raises(UserError, match=r"marks_step_wrong must return True, False or None, not"):
        is_marked_wrong(marks, rollout("4+0=", "1+-"), 1, chat_tokenizer("mistral"))


def test_a_mixture_s_sources_have_their_own_functions(tmp_path: Path) -> None:
    overlay = """
data:
  train:
    kind: mixture
    sources:
      sums: {kind: generated, generator_function: "mine_tasks.py:sums", num_examples: 3}
      swaps: {kind: procedural, task: state_tracking, num_examples: 3}
"""
    config, tokenizer = config_of(tmp_path, overlay=overlay), chat_tokenizer("mistral")
    assert list(functions_beside_generators(config.data, "marks_step_wrong")) == ["sums"]
    oracle = oracle_of(config, tokenizer)
    assert oracle(rollout("3a31=", "a1", "sums")) == ["3a31=0", "3a31=1"]
    assert oracle(rollout("3a31=", "a1", "swaps")) == ["1 on", "1 on a+"]


def test_a_shipped_task_leaves_python_s_path_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the current folder must not stand in for a module of a run without user code."""
    monkeypatch.chdir(tmp_path)
    before = [*sys.path]
    config = load_config(FitConfig, [ROOT / "conf/vapo.yaml"], [])
    assert list(functions_beside_generators(config.data, "oracle_states")) == [""]
    assert sys.path == before
