"""The file of single prompts' scores, and what is made of it, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vapo.tracking.prompt_scores import (
    SCORES_NAME,
    PromptHistory,
    ScoredPrompts,
    ScoresFile,
    history_of,
    unique,
)
from vapo.types import PromptScore


def scored(number: int, **correct: int) -> ScoredPrompts:
    """A policy after so many iterations; each prompt was answered four times."""
    scores = tuple(PromptScore(name, right, 4) for name, right in correct.items())
    return ScoredPrompts(number, 10 * number, scores)


def batch(history: PromptHistory, number: int, **correct: int) -> None:
    made = scored(number, **correct)
    history.add("batch", history.with_news(number, made.policy_steps, made.scores))


def test_fresh_prompts_are_the_new_ones_of_the_last_batches() -> None:
    """Of five batches the last two count; `b` was in an earlier one, `d` twice in these."""
    history = PromptHistory()
    for number, name in enumerate("abc"):
        batch(history, number, **{name: 4})
    batch(history, 3, b=4, d=1)
    batch(history, 4, d=4, e=2)
    fresh = history.fresh()
    assert [(one.prompt, one.num_correct) for one in fresh.scores] == [("d", 1), ("e", 2)]
    assert fresh.means == [0.25, 0.5]
    assert (fresh.num_responses, fresh.num_batches) == (8, 2)


@pytest.mark.parametrize(("batches", "counted"), [(1, 1), (3, 1), (12, 6), (16, 8), (40, 8)])
def test_the_last_eight_batches_count_or_the_last_half(batches: int, counted: int) -> None:
    history = PromptHistory()
    for number in range(batches):
        batch(history, number, **{f"p{number}": 1})
    assert history.fresh().num_batches == counted
    last = [f"p{number}" for number in range(batches - counted, batches)]
    assert [one.prompt for one in history.fresh().scores] == last


def test_the_recent_policies_are_four_without_the_start() -> None:
    history = PromptHistory()
    for number, right in enumerate([0, 4, 1, 2, 3, 4]):  # the first is before all training
        history.add("evaluation", scored(number, a=right, b=4))
    assert history.recent() == ({"a": 10 / 16, "b": 1.0}, 4)
    assert history.recent(within=20) == ({"a": 5 / 8, "b": 1.0}, 2)
    assert history.recent(within=5) == ({}, 0)
    last = history.evaluated("evaluation", within=35)
    assert last is not None
    assert last.means == {"a": 0.5, "b": 1.0}
    assert history.evaluated("average") is None


def test_a_prompt_that_is_there_twice_keeps_both_scores() -> None:
    same = [PromptScore("a", 1, 2), PromptScore("b", 0, 2), PromptScore("a", 2, 2)]
    assert [one.prompt for one in unique(same)] == ["a", "b", "a#2"]
    history = PromptHistory()
    history.add("batch", history.with_news(0, 0, same))
    assert history.with_news(1, 1, same[1:]).is_new == (False, False)
    assert len(history.fresh().scores) == 3


def test_a_resumed_run_forgets_the_future_that_was_given_up(tmp_path: Path) -> None:
    """Killed after batch 2 and in the middle of a line; resumed after one iteration."""
    file = ScoresFile(tmp_path, pytest.fail)
    file.begin(0)
    file.add("evaluation", scored(0, h=1))
    for number, name in enumerate("abc"):
        made = scored(number, **{name: 4})
        file.add("batch", file.history.with_news(number, made.policy_steps, made.scores))
    file.add("evaluation", scored(3, h=4))
    with (tmp_path / SCORES_NAME).open("a") as half:
        half.write('{"kind": "batch", "policy_it')

    again = ScoresFile(tmp_path, pytest.fail)
    again.begin(1)
    again.add("batch", again.history.with_news(1, 10, scored(1, b=2, a=2).scores))
    found = history_of(again.read() or "")
    assert found == again.history
    assert [one.means for one in found.of_kind["batch"].values()] == [
        {"a": 1.0},
        {"b": 0.5, "a": 0.5},
    ]
    assert found.of_kind["batch"][1].is_new == (True, False)
    assert list(found.of_kind["evaluation"]) == [0]


def test_the_file_is_one_short_line_for_each(tmp_path: Path) -> None:
    file = ScoresFile(tmp_path, pytest.fail)
    file.begin(0)
    file.add("evaluation", scored(2, a=1, b=0))
    mixed = (PromptScore("c", 1, 4), PromptScore("d", 0, 2))
    file.add("batch", file.history.with_news(2, 20, mixed))
    lines = (tmp_path / SCORES_NAME).read_text().split("\n")
    assert lines[2:] == [
        '{"kind":"evaluation","policy_iterations":2,"policy_steps":20,'
        '"prompts":["a","b"],"correct":[1,0],"responses":4}',
        '{"kind":"batch","policy_iterations":2,"policy_steps":20,'
        '"prompts":["c","d"],"correct":[1,0],"responses":[4,2],"new":[true,true]}',
        "",
    ]


GOOD = {
    "kind": "evaluation",
    "policy_iterations": 1,
    "policy_steps": 4,
    "prompts": ["a"],
    "correct": [1],
    "responses": 2,
}


@pytest.mark.parametrize(
    "change",
    [
        {"correct": [3]},
        {"correct": [-1]},
        {"correct": [True]},
        {"correct": [1.0]},
        {"correct": [1, 1]},
        {"correct": 1},
        {"correct": [float("nan")]},
        {"responses": 0},
        {"responses": [2, 2]},
        {"prompts": ["a" * 41]},
        {"prompts": [["a"]]},
        {"prompts": ["a", "a"], "correct": [1, 1]},
        {"prompts": None},
        {"policy_iterations": "1"},
        {"policy_steps": 1e400},
        {"kind": "other"},
        {"kind": ["batch"]},
        {"kind": "batch", "new": []},
        {"kind": "batch", "new": 1},
    ],
)
def test_a_line_that_no_run_writes_is_left_out(change: dict[str, object]) -> None:
    text = "\n".join(["[" * 100_000, "null", json.dumps(GOOD | change), "{}", "3", '"x"'])
    assert history_of(text) == PromptHistory()
    assert history_of(json.dumps(GOOD)).evaluated("evaluation") is not None


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / SCORES_NAME).symlink_to(elsewhere)
    notes: list[str] = []
    file = ScoresFile(folder, notes.append)
    file.begin(0)
    file.add("evaluation", scored(0, a=1))
    assert len(notes) == 1
    assert "no more scores of prompts are written" in notes[0]
    assert elsewhere.read_text() == "mine"
    assert file.read() is None
    assert file.history.evaluated("evaluation") is not None, "the run's own scores go on"
