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
from vapo.studies.inspection import critic_verdicts, reward_doubts
from vapo.studies.inspection import verdicts as verdicts_module
from vapo.studies.inspection.findings import collect_findings
from vapo.studies.inspection.remarks import INSPECT_ROWS, Remark
from vapo.studies.inspection.responses import InspectedResponse
from vapo.studies.inspection.verdicts import verdicts

DOCS = Path(__file__).parents[3] / "docs"
Responses = Sequence[InspectedResponse]


def said(responses: Responses) -> list[Remark]:
    return verdicts(collect_findings(iter(responses)))


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
    (above,) = re.findall(r"and lie ([\d.]+) above them on average", first.text)
    assert float(above) == pytest.approx(3.0, abs=0.15)
    explained = float(re.findall(r"explained variance is (-[\d.]+) \[", first.text)[0])
    assert explained == pytest.approx(-4.0, abs=0.5)  # 1 - (1 + 2^2) / 1
    assert "newly initialized" in first.advice


@pytest.mark.parametrize("shift", [0.0, 0.6, pytest.param(-3.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spread", [0.2, pytest.param(0.4, marks=pytest.mark.slow)])
def test_a_fresh_head_of_small_numbers_knows_nothing(spread: float, shift: float) -> None:
    """Its shift is told with it."""
    rows = made_up.small_noise(made_up.sound(num_prompts=150), spread, shift)
    (found,) = [one for one in said(rows) if one.severity == "wrong"]
    assert found.title == "The critic knows nothing of the returns (yet)"
    assert ("above" in found.text, "below" in found.text) == (shift > 0, shift < 0)


@pytest.mark.parametrize("spread", [0.03, 0.1])
def test_a_critic_of_what_cannot_be_predicted_is_not_accused(spread: float) -> None:
    rows = made_up.coin_flips(made_up.sound(num_prompts=150))
    found = said(made_up.small_noise(rows, spread))
    assert not [remark for remark in found if remark.severity == "wrong"]
    assert "inspect-little" in {remark.anchor for remark in found}


@pytest.mark.parametrize("two", [0.0, 0.05])
def test_before_its_first_token_a_response_is_its_prompt(two: float) -> None:
    remarks = said(made_up.one_token(two=two))
    assert {"inspect-follows"} <= {remark.anchor for remark in remarks}
    assert not [one for one in remarks if one.severity == "wrong"]


def test_what_the_prompt_decides_is_the_prompt_s_mean() -> None:
    """All rewards of a group are equal, and the critic knows them, but not how long it takes."""
    rows = made_up.sound()
    best = {row.group: row.reward for row in rows}
    rows = [replace(row, reward=best[row.group]) for row in rows]
    known = made_up.with_values(rows, lambda row, v: np.full_like(v, 0.95 * row.reward))
    assert "inspect-prompt-mean" not in {
        one.anchor for one in verdicts(collect_findings(known, gamma=0.99))
    }


def test_few_large_groups_of_different_lengths_do_not_read_length() -> None:
    """Where each prompt has a length of its own, length tells the prompt."""
    rows = made_up.prompt_mean(made_up.sound(num_prompts=4, size=150))
    found = collect_findings(rows)
    assert found.critic is not None
    assert found.critic.by_length.high < 0.6
    assert wrong(rows) == ["inspect-prompt-mean"]


def test_a_trend_of_small_values_does_not_matter() -> None:
    """A critic of what cannot be predicted, whose values fall by a tenth of the returns' sd."""
    rows = made_up.coin_flips(made_up.sound())
    trend = made_up.with_values(rows, lambda _, v: 0.05 - 0.012 * np.arange(len(v)))
    found = collect_findings(trend)
    assert found.critic is not None
    assert found.critic.by_length.low > 0.95
    assert not [one for one in verdicts(found) if one.severity == "wrong"]


def test_a_critic_that_reads_length_for_nothing_and_knows_some() -> None:
    """Rewards do not depend on length, so nothing can be right about it."""
    rows = made_up.with_values(
        made_up.sound(), lambda _, v: 0.5 - 1.2 * np.arange(len(v)) / 10 + 0.21 * v
    )
    (found,) = [one for one in said(rows) if one.severity == "wrong"]
    assert found.title == "The critic reads length"


# ---- rewards along the way -------------------------------------------------------------------


def test_returns_are_what_is_left_to_earn() -> None:
    rows = made_up.step_rewards()
    found = collect_findings(rows)
    assert found.critic is not None
    assert found.critic.bias.low < 0 < found.critic.bias.high
    assert found.critic.slope.low < 1 < found.critic.slope.high
    assert found.sums.explained.value == pytest.approx(found.critic.explained.value)
    assert not wrong(rows)
    assert "inspect-rewards" not in {one.anchor for one in said(rows)}


def test_rewards_along_the_way_that_a_file_lacks_are_suspected() -> None:
    """Against the reward at the end the values seem too low, and to read length."""
    rows = [replace(row, token_rewards=None) for row in made_up.step_rewards()]
    remarks = {one.anchor: one for one in said(rows)}
    assert not wrong(rows)
    assert "the file's own return at the last token is not the reward" in (
        remarks["inspect-rewards"].text
    )
    blind = [replace(row, returns=None) for row in rows]
    assert wrong(blind), "nothing is left that shows it"
    turns = [
        replace(row, is_sampled=tuple(t != 2 for t in range(len(row.values or ()))))
        for row in blind
    ]
    assert not wrong(turns)
    assert "there are several turns" in {o.anchor: o for o in said(turns)}["inspect-rewards"].text


def test_returns_of_another_lambda_and_of_truncated_responses_are_no_suspicion() -> None:
    rows = made_up.sound()
    targets = [
        replace(row, returns=(*(row.values or ())[1:], row.reward)) for row in rows
    ]  # lambda 0
    assert "inspect-rewards" not in {one.anchor for one in said(targets)}
    cut = [replace(row, returns=row.values, is_truncated=True) for row in rows]
    assert "inspect-rewards" not in {one.anchor for one in said(cut)}
    answered = [
        replace(row, is_sampled=(*[True] * (len(row.values or ()) - 2), False, False))
        for row in rows
    ]  # one turn, and what was said of it
    assert "inspect-rewards" not in {one.anchor for one in said(answered)}
    constant = made_up.with_values(rows, lambda _, v: 0 * v)
    missing = [replace(row, returns=row.values, is_truncated=False) for row in constant]
    assert wrong(missing) == ["inspect-constant"], "whatever the returns are"


# ---- beside others ---------------------------------------------------------------------------


def test_siblings_and_critic_are_compared_over_the_same_tokens() -> None:
    """Short responses are decided by their prompt, long ones by chance; the critic knows it all.

    By response the siblings' mean explains more than the critic does by token.
    """
    draw, rows = random.Random(0), list[InspectedResponse]()
    for prompt in range(120):
        is_short, reward = prompt % 4 > 0, draw.choice([-1.0, 1.0])
        for _ in range(8):
            earned = reward if is_short else draw.choice([-1.0, 1.0])
            known, length = (reward, 2) if is_short else (0.0, 30)
            values = (known,) * (length - 1) + (earned,)
            (one,) = made_up.sound(1, 1)
            place = f"made_up.jsonl, row {len(rows) + 1}"
            rows.append(replace(one, place=place, group=str(prompt), reward=earned, values=values))
    found = collect_findings([replace(row, tokens=None, logprobs=None) for row in rows])
    assert found.critic is not None
    assert found.critic.explained.high < found.groups.left_out_mean.low
    assert found.critic.siblings_ahead.high < 0
    assert "inspect-siblings" not in {one.anchor for one in verdicts(found)}


def test_a_critic_that_knows_less_than_the_siblings_is_told() -> None:
    noise = np.random.default_rng(0).normal
    rows = made_up.with_values(
        made_up.one_token(size=16), lambda _, v: v + 0.35 * noise(size=len(v))
    )
    found = {one.anchor: one for one in said(rows)}
    assert {"inspect-follows", "inspect-siblings"} <= found.keys()
    more = float(re.findall(r"it explains ([\d.]+) \[", found["inspect-siblings"].text)[0])
    # the critic's noise, less that of a mean of 15 rewards whose variance is 1 - 0.27
    assert more == pytest.approx(0.35**2 - 0.73 / 15, abs=0.04)


def test_values_that_know_the_reward_before_the_first_token() -> None:
    """Half of each value is the reward: no critic can know it, however well it explains returns."""
    responses = made_up.sound()
    leaking = made_up.with_values(responses, lambda row, v: 0.5 * v + 0.5 * row.reward)
    assert wrong(leaking) == ["inspect-leak"]
    assert "inspect-follows" not in {remark.anchor for remark in said(leaking)}
    noise = np.random.default_rng(0).normal  # of low precision, for example
    noisy = made_up.with_values(responses, lambda _, v: v + 0.05 * noise(size=len(v)))
    assert wrong(noisy) == []


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
    assert [remark.anchor for remark in said(constant)] == ["inspect-constant"], (
        "more responses would not tell where a constant stands"
    )
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
    found = {one.anchor: one for one in said(made_up.sound(num_prompts=3))}
    assert found.keys() == {"inspect-alignment", "inspect-too-few", "inspect-micro-batches"}
    assert "what the critic knows: its values are of 3 prompts" in found["inspect-too-few"].text


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
    assert rows == INSPECT_ROWS


def test_the_documentation_has_the_thresholds() -> None:
    text = (DOCS / "value_page.md").read_text(encoding="utf-8")
    text += (DOCS / "inspect_verdicts.md").read_text(encoding="utf-8")
    known = {
        name: value
        for module in (critic_verdicts, reward_doubts, verdicts_module)
        for name, value in vars(module).items()
        if name.isupper() and name[0] != "_" and isinstance(value, float)
    }
    assert len(known) == 23
    for name, value in known.items():
        assert f"`{name}` = {value:g}" in text, name
