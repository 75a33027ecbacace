"""Five critics that are broken in the ways that happen are named; sound ones are not accused."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.studies.inspection import made_up
from vapo.studies.inspection import critic_verdicts
from vapo.studies.inspection import verdicts as verdicts_module
from vapo.studies.inspection.findings import find
from vapo.studies.inspection.remarks import ROWS, Remark
from vapo.studies.inspection.responses import InspectedResponse
from vapo.studies.inspection.verdicts import verdicts

DOCS = Path(__file__).parents[3] / "docs"
Responses = Sequence[InspectedResponse]


def said(responses: Responses) -> list[Remark]:
    return verdicts(find(iter(responses)))


def wrong(responses: Responses) -> list[str]:
    return [remark.anchor for remark in said(responses) if remark.severity == "wrong"]


@pytest.mark.parametrize(
    ("spoil", "anchors"),
    [
        (made_up.untrained, {"inspect-untrained"}),
        (made_up.off_by_one, {"inspect-off-by-one"}),
        (made_up.lagging, {"inspect-off-by-one"}),
        (made_up.wrong_scale, {"inspect-scale"}),
        (made_up.percent, {"inspect-scale"}),
        (made_up.prompt_mean, {"inspect-prompt-mean"}),
        (made_up.reads_length, {"inspect-length"}),
    ],
)
def test_a_broken_critic_is_named(
    spoil: Callable[[Responses], list[InspectedResponse]], anchors: set[str]
) -> None:
    assert set(wrong(spoil(made_up.sound()))) == anchors


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("size", [4, 8])
def test_a_sound_critic_is_not_accused(seed: int, size: int) -> None:
    remarks = said(made_up.sound(size=size, seed=seed))
    assert not [remark for remark in remarks if remark.severity == "wrong"]
    assert {"inspect-follows", "inspect-alignment"} <= {remark.anchor for remark in remarks}


def test_the_untrained_head_is_told_with_its_figures() -> None:
    (first, *_) = said(made_up.untrained(made_up.sound()))
    assert first.title == "A value head that was never trained"
    assert "lie 3." in first.text or "lie 2.9" in first.text
    explained = float(re.findall(r"explained variance is (-[\d.]+) \[", first.text)[0])
    assert explained == pytest.approx(-4.0, abs=0.5)  # 1 - (1 + 2^2) / 1
    assert "newly initialized" in first.advice


def test_shifted_flat_and_extreme_values() -> None:
    responses = made_up.sound()
    shifted = made_up.with_values(responses, lambda _, v: v + 0.5)
    assert wrong(shifted) == ["inspect-shifted"]
    mean = sum(r.reward for r in responses) / len(responses)
    flat = made_up.with_values(responses, lambda _, v: mean + 0.3 * (v - mean))
    assert wrong(flat) == ["inspect-flat"]
    noise = np.random.default_rng(0).normal  # as of verdicts that were learned by heart
    extreme = made_up.with_values(
        responses, lambda _, v: np.clip(v + 0.8 * noise(size=len(v)), -1.4, 1.4)
    )
    assert wrong(extreme) == ["inspect-extreme"]
    constant = made_up.with_values(responses, lambda _, v: 0 * v + mean)
    assert wrong(constant) == ["inspect-constant"]
    (inverted, *_) = said(made_up.with_values(responses, lambda _, v: 2 * mean - v))
    assert (inverted.severity, inverted.title) == ("wrong", "The values have the wrong sign")


def test_a_critic_that_is_right_about_length_is_not_accused() -> None:
    """Each token may end the response, and the longer it is, the worse: nothing else matters."""
    draw, responses = random.Random(0), []
    for number in range(400):
        length = next(n for n in itertools.count(2) if draw.random() < 0.25 or n == 12)
        reward = 1.0 if draw.random() < 1.2 - 0.1 * length else 0.0
        values = [max(0.0, 1.2 - 0.1 * min(t + 4, 12)) for t in range(length)]
        responses.append(
            replace(
                made_up.sound(1, 1)[0],
                reward=reward,
                group=str(number // 4),
                tokens=tuple("ab"[draw.random() < 0.5] for _ in range(length)),
                values=tuple(values),
                logprobs=None,
            )
        )
    remarks = said(responses)
    assert not [remark for remark in remarks if remark.severity == "wrong"]
    (length_remark,) = [r for r in remarks if r.anchor == "inspect-length"]
    assert "the rewards depend on it" in length_remark.title


def test_rewards_of_0_and_1_and_one_response_per_prompt() -> None:
    halves = [
        replace(r, reward=(r.reward + 1) / 2, values=tuple((v + 1) / 2 for v in r.values or ()))
        for r in made_up.sound(size=1, num_prompts=300)
    ]
    assert not wrong(halves)
    assert wrong([replace(r, reward=2 * r.reward - 1) for r in halves]) == ["inspect-scale"]
    tenths = made_up.with_values(halves, lambda _, v: 0.1 * v)
    assert wrong(tenths) == ["inspect-scale"]


def test_without_values_it_says_what_a_critic_could_know() -> None:
    bare = [replace(r, values=None) for r in made_up.sound()]
    remarks = said(bare)
    assert [remark.anchor for remark in remarks] == ["inspect-could-know"]
    assert "lies between prompts" in remarks[0].text
    alone = [replace(r, group=r.place) for r in bare]
    assert "no groups" in said(alone)[0].title


def test_few_prompts_are_too_few() -> None:
    (*_, last) = said(made_up.sound(num_prompts=3))
    assert last.anchor == "inspect-too-few" or not wrong(made_up.sound(num_prompts=3))


def test_equal_rewards_say_nothing() -> None:
    equal = [replace(r, reward=1.0) for r in made_up.sound()]
    assert "inspect-equal-rewards" in wrong(equal)


def test_a_mean_over_micro_batches_is_told_apart() -> None:
    remarks = {remark.anchor: remark for remark in said(made_up.sound(seed=3))}
    remark = remarks["inspect-micro-batches"]
    assert "responses is" in remark.text


def test_the_course_is_told() -> None:
    steps = [made_up.sound(15, step=step, seed=step) for step in range(8)]
    same = [r for step in steps for r in step]
    assert "inspect-over-time" not in {one.anchor for one in said(same)}
    spoiled = [r for step in steps[:4] for r in step]
    spoiled += [r for step in steps[4:] for r in made_up.untrained(step)]
    found = {remark.anchor: remark for remark in said(spoiled)}["inspect-over-time"]
    assert found.severity == "wrong"
    assert "(steps 0 to 1)" in found.text
    assert "(steps 6 to 7)" in found.text


def test_two_runs_are_judged_one_by_one() -> None:
    sound = [r for step in (1, 2) for r in made_up.sound(20, step=step, seed=step)]
    other = [replace(r, place=f"runs/other.jsonl, row {i}") for i, r in enumerate(sound)]
    remarks = said([*sound, *made_up.reads_length(other)])
    wrong = [remark.title for remark in remarks if remark.severity == "wrong"]
    assert wrong == ["other.jsonl: The critic reads length"]
    assert "made_up.jsonl: The critic follows the returns" in {one.title for one in remarks}


def test_two_files_without_steps_are_compared() -> None:
    early = made_up.sound(60)
    late = made_up.untrained(made_up.sound(60, seed=1))
    late = [replace(r, place=f"late.jsonl, row {i}") for i, r in enumerate(late)]
    titles = [remark.title for remark in said([*early, *late]) if remark.severity == "wrong"]
    assert titles == ["late.jsonl: A value head that was never trained", "Explained variance fell"]


def test_numbers_that_cannot_be_are_told() -> None:
    first, *others = made_up.sound()
    bad = replace(first, values=None, not_finite=("values",), logprobs=(0.5,) * 7)
    assert {"inspect-not-finite", "inspect-log-probs"} <= set(wrong([bad, *others]))


def test_every_remark_has_its_row_in_the_documentation() -> None:
    text = (DOCS / "value_page.md").read_text(encoding="utf-8")
    table = text.partition("### Verdicts of vapo inspect")[2].partition("\n### ")[0]
    rows = dict(re.findall(r'^\| <a id="([\w-]+)"></a>(.*?) \|', table, re.MULTILINE))
    assert rows == ROWS


def test_the_documentation_has_the_thresholds() -> None:
    text = (DOCS / "inspect_verdicts.md").read_text(encoding="utf-8")
    known = {
        name: value
        for module in (critic_verdicts, verdicts_module)
        for name, value in vars(module).items()
        if name.isupper() and name[0] != "_" and isinstance(value, float)
    }
    assert len(known) == 19
    for name, value in known.items():
        assert f"`{name}` = {value:g}" in text, name
