"""The critics' board: how values of any framework are read, checked and scored."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.config.fits import ROOT
from vapo.intervals import Figure
from vapo.rollouts.rollout_file import METADATA_KEY

BOARD = ROOT / "experiments/critics/board"


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BOARD))
    return import_module("score_critics")


def row(group: int, ids: Sequence[int], reward: float, states: Sequence[str], **truth: Any) -> Any:
    return {
        "group": group,
        "prompt": f"prompt {group}",
        "answer": "5",
        "prompt_ids": [1],
        "response_ids": list(ids),
        "rollout_logprobs": [-0.5] * len(ids),
        "reward": reward,
        "oracle_state": list(states),
        "truth_tokens": truth.get("tokens"),
        "truth_values": truth.get("values"),
        "truth_rows": truth.get("rows"),
        "truth_continuations": truth.get("num"),
    }


TRAINING = [
    row(0, [7, 7], 1.0, ["a", "b"]),
    row(0, [7, 8], -1.0, ["a", "a"]),
]
TEST = [
    row(1, [7, 8, 9], 1.0, ["a", "b", "c"], tokens=[0, 2], values=[0.5, -1.0], rows=[2, 1], num=4),
    row(1, [7, 9], -1.0, ["a", "b"]),
    row(2, [7], 1.0, ["b"]),
    row(2, [7, 7], 1.0, ["b", "a"]),
]


@pytest.fixture
def rollouts(score: ModuleType, tmp_path: Path) -> Any:
    for name, rows in (("train", TRAINING), ("test", TEST)):
        types = pa.schema(
            {"truth_tokens": pa.list_(pa.int32()), "truth_values": pa.list_(pa.float32())}
        )
        table = pa.Table.from_pylist(rows)
        if name == "train":  # a column of nulls has no type of its own
            for field in types:
                index = table.column_names.index(field.name)
                table = table.set_column(index, field, table.column(field.name).cast(field.type))
        metadata = {METADATA_KEY: b'{"reward": [1.0, -1.0]}'}
        parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / f"{name}.parquet")
    return score.read_set(tmp_path / "train.parquet", tmp_path / "test.parquet", {8})


def test_the_oracle_is_made_of_training_responses_alone(rollouts: Any) -> None:
    """A state's value is the mean of its training tokens and of one more with the mean of all."""
    one, two, *_ = rollouts.judge.responses
    # the tokens have returns 1 1 -1 -1, mean 0: state a has 1 -1 -1 and a 0, state b 1 and a 0
    assert one.oracle.tolist() == [-0.25, 0.5, 0.0], "no training token is in state c"
    assert two.oracle.tolist() == [-0.25, 0.5]
    assert one.step_starts == [0, 2]


def test_continuations_are_read_as_the_returns_that_they_were(rollouts: Any) -> None:
    first, second = rollouts.points
    assert sorted(first.returns) == [-1.0, 1.0, 1.0, 1.0]
    assert (first.mean, first.num_places, first.baseline) == (0.5, 2, -1.0)
    assert second.returns == (-1.0,) * 4
    assert (second.row, second.num_tokens, second.length) == (0, 2, 3)


def write_values(path: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


def test_values_of_any_framework_are_a_column(
    score: ModuleType, rollouts: Any, tmp_path: Path
) -> None:
    values = [[0.0, 0.5, 1.0], [0.0, 0.5], [2.0], [2.0, 3.0]]
    [mine] = score.read_values(write_values(tmp_path / "mine.parquet", values=values), rollouts)
    assert (mine.name, mine.processor_s) == ("mine", None)
    assert [row.tolist() for row in mine.values_by_seed[0]] == values
    path = write_values(
        tmp_path / "several.parquet",
        critic=["A"] * 8,
        seed=[0] * 4 + [1] * 4,
        row=[4, 3, 2, 1] * 2,
        values=values[::-1] * 2,
        processor_s=[2.0] * 4 + [4.0] * 4,
    )
    [several] = score.read_values(path, rollouts)
    assert (several.name, several.processor_s) == ("A", 3.0)
    assert [[row.tolist() for row in seed] for seed in several.values_by_seed] == [values] * 2


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"value": [1.0]}, "no column values; it has value"),
        ({"values": [[0.0, 0.0]]}, "row 1 (bad, seed 0): the response has 3 tokens, and 2 values"),
        ({"values": [[0.0] * 3]}, "bad, seed 0: 1 of 4 responses"),
        ({"values": [[0.0] * 3], "row": [5]}, "row 5 is a second one, or not from 1 to 4"),
        ({"values": [[0.0, math.nan, 0.0]]}, "a value is not a finite number"),
        ({"values": [[0.0, None, 0.0]]}, "a value is not a finite number"),
    ],
)
def test_a_bad_file_is_refused(
    score: ModuleType, rollouts: Any, tmp_path: Path, columns: Any, message: str
) -> None:
    path = write_values(tmp_path / "bad.parquet", **columns)
    with pytest.raises(SystemExit) as refused:
        score.read_values(path, rollouts)
    assert str(refused.value).startswith(str(path))
    assert message in str(refused.value)


def own_reward(training: Any) -> Callable[[Any], Any]:
    return lambda responses: [np.full(len(r.response_ids), r.reward) for r in responses]


def length(training: Any) -> Callable[[Any], Any]:
    return lambda responses: [np.full(len(r.response_ids), len(r.response_ids)) for r in responses]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (own_reward, "changes by 2 with its own response's reward"),
        (length, "row 1 changes by 1 with later tokens"),
        (lambda training: lambda responses: [[0.0]] * 4, "are not one for each token"),
    ],
)
def test_a_function_that_knows_too_much_is_refused(
    score: ModuleType, rollouts: Any, function: Any, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        score.run_function(function, "mine", rollouts)


def test_the_functions_of_the_board(score: ModuleType, rollouts: Any) -> None:
    critics = import_module("small_critics")
    lists = lambda function: [v.tolist() for v in function(rollouts.training)(rollouts.test)]  # noqa: E731
    assert lists(critics.constant) == [[0.0] * 3, [0.0] * 2, [0.0], [0.0] * 2]
    assert lists(critics.others_mean) == [[-1.0] * 3, [1.0] * 2, [1.0], [1.0] * 2]
    for function in (critics.constant, critics.others_mean, critics.ridge_on_logprobs):
        score.run_function(function, "one of the board", rollouts)  # each passes its checks


def test_values_that_differ_in_one_state_are_marked(score: ModuleType, rollouts: Any) -> None:
    """Rows 1 and 2 share the state after their first token, rows 3 and 4 their first state."""
    differing = [np.array(v) for v in ([0.0, 1.0, 0.0], [0.0, 2.0], [1.0], [1.0, 0.0])]
    # differences 1 and 0; the values 0 1 0 0 2 1 1 0 have the variance 7/8 - 25/64
    expected = math.sqrt(1 / 2) / math.sqrt(7 / 8 - 25 / 64)
    assert score.difference_at_shared_states(differing, rollouts.test) == pytest.approx(expected)
    same = [np.array(v) for v in ([0.0, 1.0, 0.0], [0.0, 1.0], [1.0], [1.0, 0.0])]
    assert score.difference_at_shared_states(same, rollouts.test) == 0


def test_an_interval_covers_prompts_and_seeds(score: ModuleType) -> None:
    one = score.over_seeds([Figure(0.5, 0.4, 0.7)])
    assert one == pytest.approx((0.5, 0.4, 0.7))
    # seeds 0.4 and 0.6: Student's 12.7062 x 0.141421 / sqrt(2) is 1.27062; prompts 0.1 and 0.2
    two = score.over_seeds([Figure(0.4, 0.3, 0.6), Figure(0.6, 0.5, 0.8)])
    assert two == pytest.approx(
        (0.5, 0.5 - math.hypot(0.1, 1.27062), 0.5 + math.hypot(0.2, 1.27062))
    )


def test_the_pages_example_is_a_critic(score: ModuleType, rollouts: Any, tmp_path: Path) -> None:
    page = (BOARD / "README.md").read_text()
    code = page.partition("<!-- mine.py -->\n```python\n")[2].partition("```")[0]
    (tmp_path / "mine.py").write_text(code)
    function = score.import_function(f"{tmp_path}/mine.py:falls_with_length", key="CRITIC")
    [values] = score.run_function(function, "mine", rollouts).values_by_seed
    # the mean of the training rewards is 0
    assert [v.tolist() for v in values] == [[0.0, -0.01, -0.02], [0.0, -0.01], [0.0], [0.0, -0.01]]


def test_the_pages_table_is_the_results(score: ModuleType) -> None:
    results = json.loads((BOARD / "results.json").read_text())
    page = (BOARD / "README.md").read_text()
    assert score.with_table(page, results) == page
    oracle = results["oracle"]
    assert oracle["truth"] == oracle["truth_within_prompts"] == [1.0, 1.0, 1.0]


def test_the_published_rollouts_are_whole_groups(score: ModuleType) -> None:
    """`read_set` refuses files that share a prompt."""
    published = score.read_set()
    for responses, num_groups in ((published.training, 128), (published.test, 64)):
        assert Counter(Counter(r.group for r in responses).values()) == {8: num_groups}
    first = published.judge.responses[0]
    assert len(first.oracle) == len(published.test[0].response_ids)


def test_files_that_share_a_prompt_are_refused(
    score: ModuleType, rollouts: Any, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"2 prompts are in .*test\.parquet, too: 'prompt 1'"):
        score.read_set(tmp_path / "test.parquet", tmp_path / "test.parquet", {8})
