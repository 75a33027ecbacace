"""Mistakes that a response marks itself are counted apart from those that it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerBase

from tests.config.fits import ROOT, STATE_TRACKING
from tests.diagnostics.test_mistakes import OUTCOMES, steps
from tests.diagnostics.value_truth.made_up_figures import figures, near
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.diagnostics.value_truth.figures import truth_figures
from vapo.diagnostics.value_truth.measure import is_marked_wrong
from vapo.diagnostics.value_truth.mistakes import MistakeCount, MistakesByMark, mistakes_by_mark
from vapo.diagnostics.value_truth.points import TruthPoint
from vapo.diagnostics.value_truth.verdict import verdict
from vapo.networks.loading import load_tokenizer
from vapo.prompts.generators import functions_beside_generators
from vapo.types import FinishReason, Prompt, Rollout


def marked(
    counts: list[int], values: list[float | None], marks: list[bool | None], row: int
) -> list[TruthPoint]:
    points = steps(counts, values, row=row)
    return [replace(point, is_marked=m) for point, m in zip(points, marks, strict=True)]


RESPONSES: list[list[list[TruthPoint]]] = [
    [
        marked([8, 8, 0], [0.5, 0.5, -0.5], [None, False, True], 0),  # marked, found
        marked([8, 0, 0], [0.5, 0.4, -0.4], [None, False, True], 1),  # unmarked; found one late
    ],
    [
        marked([8, 0, 0], [0.5, -0.4, -0.5], [None, False, True], 2),  # unmarked, found
        marked([8, 8, 8], [0.5, -0.4, 0.5], [None, False, True], 3),  # no mistake
    ],
]


def test_marked_and_unmarked_mistakes_by_hand() -> None:
    """The mark that counts is that of the first clear fall's own step, not of a later one."""
    found = mistakes_by_mark(RESPONSES, OUTCOMES)
    assert found == MistakesByMark(marked=MistakeCount(1, 1), unmarked=MistakeCount(1, 2))
    assert str(found) == "1 of 1 that the response marks itself, 1 of 2 unmarked"


def test_the_figures_have_them() -> None:
    points = [point for own in RESPONSES for steps in own for point in steps]
    found = truth_figures(points, outcomes=OUTCOMES, seed=0)
    assert found.mistakes.unmarked == MistakeCount(1, 2)


@pytest.mark.parametrize("recall", [0.9, 0.5, 0.2])
def test_what_is_said_of_mistakes_has_both_groups(recall: float) -> None:
    """Whether the critic names them, does not, or it is not known."""
    counts = MistakesByMark(marked=MistakeCount(9, 9), unmarked=MistakeCount(1, 4))
    said = verdict(figures(mistake_recall=near(recall), mistakes=counts))
    (text,) = [remark.text for remark in said if "the first mistake" in remark.text]
    assert "9 of 9 that the response marks itself, 1 of 4 unmarked" in text


def test_a_task_that_cannot_tell_says_so() -> None:
    unmarked = [[steps([8, 0], [0.5, -0.5])]]
    found = mistakes_by_mark(unmarked, OUTCOMES)
    assert found == MistakesByMark(unchecked=MistakeCount(1, 1))
    said = " ".join(remark.text for remark in verdict(figures(mistakes=found)))
    assert "the task does not tell whether responses mark their mistakes themselves" in said


def rollout(text: str, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    ids = tuple(tokenizer(text)["input_ids"])
    return Rollout(
        Prompt("p", "1aA=", (1,), "5"), ids, text, (0.0,) * len(ids), FinishReason.LENGTH
    )


def test_the_mark_is_the_check_that_ends_the_prefix() -> None:
    config = load_config(FitConfig, [ROOT / "conf/vapo.yaml"], [])
    tokenizer = load_tokenizer(str(ROOT / config.actor.path), key="actor.path")
    response = rollout("aC5+bF2-;2", tokenizer)
    marks = functions_beside_generators(config.data, "marks_step_wrong")
    found = [is_marked_wrong(marks, response, num, tokenizer) for num in (0, 4, 6, 8, 9)]
    assert found == [None, False, None, True, None]


def test_swaps_have_no_checks() -> None:
    config = load_config(FitConfig, STATE_TRACKING, [])
    assert functions_beside_generators(config.data, "marks_step_wrong") == {}
    tokenizer = load_tokenizer(str(ROOT / config.actor.path), key="actor.path")
    assert is_marked_wrong({}, rollout("a4b3;3", tokenizer), 2, tokenizer) is None
