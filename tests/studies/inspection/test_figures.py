"""The figures, against numbers worked out by hand and against values that are known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.studies.inspection import made_up
from vapo.functional.metrics import gradient_noise_ratio
from vapo.intervals import Figure
from vapo.studies.inspection.figures import CriticFigures, critic_figures
from vapo.studies.inspection.findings import collect_findings
from vapo.studies.inspection.group_sample import (
    GroupSample,
    ResponseValues,
    num_tokens,
    response_values,
    returns_of,
    tokens_of,
)
from vapo.studies.inspection.groups import Groups
from vapo.studies.inspection.report import _forecast
from vapo.studies.inspection.responses import BadRow, InspectedResponse
from vapo.studies.inspection.running import MicroBatches, Moments, NotFinite


def response(
    reward: float, values: list[float] | None, group: str = "0", place: int = 1
) -> InspectedResponse:
    return InspectedResponse(
        place=f"a.jsonl, row {place}",
        prompt="1+1=",
        response="2",
        reward=reward,
        group=group,
        values=None if values is None else tuple(values),
    )


def of(responses: list[InspectedResponse], gamma: float = 1.0) -> CriticFigures:
    groups: dict[tuple[str, str], list[ResponseValues]] = {}
    for one in responses:
        own = response_values(one)
        assert own is not None
        groups.setdefault(("", one.group), []).append(own)
    found = critic_figures(tokens_of(groups, gamma=gamma), seed=0)
    assert found is not None
    return found


def test_by_hand() -> None:
    """Returns 1, 1, -1, -1 and values 0.5, 1, 0, -0.5."""
    found = of([response(1, [0.5, 1.0]), response(-1, [0.0, -0.5], group="1")])
    v, r = np.array([0.5, 1, 0, -0.5]), np.array([1.0, 1, -1, -1])
    assert found.explained.value == pytest.approx(1 - (r - v).var())
    assert found.explained.value == pytest.approx(0.6875)
    assert found.bias.value == pytest.approx(0.25)
    assert found.explained_unshifted.value == pytest.approx(1 - ((r - v) ** 2).mean())
    assert found.slope.value == pytest.approx(np.cov(v, r, bias=True)[0, 1] / v.var())
    assert found.intercept.value == pytest.approx(-0.25 * found.slope.value)
    assert found.correlation.value == pytest.approx(np.corrcoef(v, r)[0, 1])
    assert found.spread.value == pytest.approx(v.std())
    assert found.outside.value == 0
    assert found.value_between.value == pytest.approx(1 - (0.125 + 0.125) / 4 / v.var())
    assert math.isnan(found.explained_between.value), "no group has two responses"
    assert not found.explained.is_bounded, "two groups have no interval"


def test_returns_are_discounted() -> None:
    found = of([response(1, [0.25, 0.5, 1.0]), response(0, [0, 0, 0])], gamma=0.5)
    assert found.explained.value == pytest.approx(1)
    assert found.bias.value == pytest.approx(0)


def test_rewards_along_the_way_are_earned_by_the_token_before() -> None:
    """Returns 1.5, 1 and 2, with the discount of sampled tokens alone."""
    own = replace(response(3, [0, 9, 0, 0]), is_sampled=(True, False, True, True))
    one = response_values(replace(own, token_rewards=(0.75, 0.25, 0.0, 2.0)))
    assert one is not None
    assert returns_of(one, 0.5).tolist() == [1.5, 1.0, 2.0]
    assert returns_of(one, 1.0).tolist() == [3.0, 2.0, 2.0]
    at_end = response_values(own)
    assert at_end is not None
    assert returns_of(at_end, 0.5).tolist() == [0.75, 1.5, 3.0]
    first = replace(own, is_sampled=(False, False, True, True), token_rewards=(5.0, 5.0, 1.0, 2.0))
    unearned = response_values(first)
    assert unearned is not None
    assert returns_of(unearned, 1.0).tolist() == [3.0, 2.0]


def test_siblings_by_hand() -> None:
    """R - mean of the others: 1, -1, 0, 0; R - V: 0.5, -0.5, 0, 0; Var(R) = 3/16."""
    found = of([
        response(1, [0.5]), response(0, [0.5]),
        response(1, [1.0], group="1"), response(1, [1.0], group="1"),
        response(5, [0.0], group="alone"),
    ])  # fmt: skip
    assert found.siblings_ahead.value == pytest.approx((1 / 8 - 1 / 2) / (3 / 16))


def test_gradient_noise_by_hand() -> None:
    """Weights (1 - p)^2 of 1/4, 9/16, 1/4, 1/4. R - V: 1/2, -1/2, 1, 0, whose mean is 1/4: squares
    1/16, 9/16, 9/16, 1/16. R - mean of the others: 1, -1, 0, 0. A token without a log-prob, and one
    without siblings, do not count."""
    half, quarter = math.log(0.5), math.log(0.25)
    rows = [
        replace(response(1, [0.5]), logprobs=(half,)),
        replace(response(0, [0.5]), logprobs=(quarter,)),
        replace(response(1, [0.0], group="1"), logprobs=(half,)),
        replace(response(1, [1.0], group="1"), logprobs=(half,)),
        replace(response(9, [0.0], group="alone"), logprobs=(half,)),
        response(1, [5.0], group="2"),
        response(0, [5.0], group="2"),
    ]
    ratio = of(rows).gradient_noise_ratio.value
    noise = 1 / 4 * 1 / 16 + 9 / 16 * 9 / 16 + 1 / 4 * 9 / 16 + 1 / 4 * 1 / 16
    assert ratio == pytest.approx(noise / (1 / 4 + 9 / 16), rel=1e-6)
    in_training = gradient_noise_ratio(
        torch.tensor([[0.5], [0.5], [0.0], [1.0]]),
        torch.tensor([0.0, 1.0, 1.0, 1.0]),
        torch.tensor([[1.0], [0.0], [1.0], [1.0]]),
        torch.tensor([[0.5], [0.25], [0.5], [0.5]]).log(),
        torch.ones(4, 1, dtype=torch.bool),
    )
    assert ratio == pytest.approx(float(in_training), rel=1e-6)
    assert of([response(1, [0.5]), response(0, [0.5])]).gradient_noise_ratio.is_unknown
    sure = [replace(row, logprobs=(0.0,)) for row in rows[:2]]
    assert of(sure).gradient_noise_ratio.is_unknown, "no token can be changed"


def test_a_token_that_was_not_sampled_brings_no_noise() -> None:
    rows = [
        replace(
            response(reward, [9.0, 0.5]), logprobs=(-3.0, math.log(0.5)), is_sampled=(False, True)
        )
        for reward in (1, 0)
    ]
    assert of(rows).gradient_noise_ratio.value == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ((0.3, 0.49), "can (0.50 in groups of 2): this critic may help"),
        ((0.91, 1.3), "this critic cannot help against the mean of the other responses: leave it"),
        ((0.4, 0.6), "not clear whether this critic can help"),
        ((-math.inf, math.inf), "not clear whether this critic can help"),
    ],
)
def test_a_line_says_whether_a_critic_can_help(limits: tuple[float, float], said: str) -> None:
    assert said in _forecast(Figure(0.5, *limits), group_size=2)
    if said.startswith("can"):  # a larger group has a better mean
        assert "not clear" not in _forecast(Figure(0.5, *limits), group_size=8)
        assert "not clear" in _forecast(Figure(0.5, *limits), group_size=1.4)
    if said.startswith("this critic cannot"):  # in no group, however large
        assert said in _forecast(Figure(0.5, 0.91, 0.93), group_size=16)


def test_the_correlation_of_first_values_by_hand() -> None:
    """Among a prompt's responses V - mean is -1, 1 and .5, -.5; R - mean is -1, 1 and -1, 1."""
    rows = [
        response(reward, [value, 9.0], group=group)
        for group, reward, value in [("a", -1, 0.0), ("a", 1, 2.0), ("b", -1, 7.0), ("b", 1, 6.0)]
    ]
    # (1 + 1 - 0.5 - 0.5) / sqrt((1 + 1 + 0.25 + 0.25) * 4)
    assert of(rows).start_correlation.value == pytest.approx(1 / 10**0.5)


def test_length_is_told_by_other_groups() -> None:
    """Values 0, 2 and 1, 5 at two places: each is one's own, less the other group's."""
    found = of([response(1, [0.0, 2.0]), response(-1, [1.0, 5.0], group="1")])
    assert found.by_length.value == pytest.approx(1 - (1 + 9 + 1 + 9) / (4 + 0 + 1 + 9))
    alone = of([response(1, [0.0, 2.0]), response(-1, [1.0], group="1")])  # place 1: mean of all
    assert alone.by_length.value == pytest.approx(1 - (1 + 1 + 1) / (1 + 1 + 0))


def test_tokens_that_were_not_sampled_are_left_out() -> None:
    own = response(1, [0.5, 9, 1.0])
    seen = replace(own, is_sampled=(True, False, True))
    assert of([seen]).num_tokens == 2
    assert of([seen]).bias.value == pytest.approx(-0.25)


def test_a_critic_that_knows_the_truth() -> None:
    """Calibrated, and between prompts it explains all but noise; its intervals hold that."""
    found = of(made_up.sound(num_prompts=400, seed=7))
    assert found.slope.low < 1 < found.slope.high
    assert found.bias.low < 0 < found.bias.high
    assert found.explained_between.low < 1 < found.explained_between.high
    assert found.explained_between.value == pytest.approx(1, abs=0.2)
    assert found.explained_within.value > 0.15
    assert found.by_length.high < 0.2


def test_a_prompt_s_mean_knows_nothing_within() -> None:
    found = of(made_up.prompt_mean(made_up.sound()))
    assert found.explained_within.value == pytest.approx(0, abs=1e-9)
    assert found.value_between.value == pytest.approx(1)


def test_length_alone() -> None:
    found = of(made_up.reads_length(made_up.sound()))
    assert found.by_length.low > 0.9
    assert found.length_correlation.value < -0.9


def test_explained_variance_in_one_piece_and_over_micro_batches() -> None:
    """Two micro-batches that each have an explained variance of 0, and together nearly 1."""
    whole, pieces = Moments(), MicroBatches(2)
    for level in (0.0, 100.0):
        for reward in (level - 1, level + 1):
            moments = Moments.of(np.array([level]), np.array([reward]))
            whole.add(moments)
            pieces.add(moments)
    assert whole.value == pytest.approx(1 - 1 / 2501)
    assert (pieces.num, pieces.mean) == (2, pytest.approx(0))
    for _ in range(2):
        pieces.add(Moments.of(np.array([1.0]), np.array([3.0])))
    assert pieces.num_undefined == 1


def test_what_the_group_tells() -> None:
    """Two groups of 1, 1 and 0, 0: the prompt decides all. 1, 0 and 1, 0: nothing."""
    groups = Groups()
    for group, reward in (("a", 1.0), ("a", 1.0), ("b", 0.0), ("b", 0.0)):
        groups.add(group, reward)
    found = groups.figures(1.0, seed=0)
    assert (found.prompt_share.value, found.left_out_mean.value) == (1, 1)
    assert (found.all_best, found.all_equal) == (0.5, 1.0)
    groups = Groups()
    for group, reward in (("a", 1.0), ("a", 0.0), ("b", 1.0), ("b", 0.0)):
        groups.add(group, reward)
    found = groups.figures(1.0, seed=0)
    assert found.prompt_share.value == pytest.approx(1 - 0.5 / 0.25)  # noise: below 0
    assert found.left_out_mean.value == pytest.approx(1 - 1 / 0.25)  # off by 1 each time
    assert found.all_equal == 0


def test_a_sample_of_groups_has_whole_groups_in_whatever_order() -> None:
    responses = made_up.sound(num_prompts=50, size=4)
    orders = [responses, sorted(responses, key=lambda r: hash((r.place, 1)))]
    kept = []
    for order in orders:
        sample = GroupSample[InspectedResponse](max_tokens=300)
        for one in order:
            sample.add(("", one.group), one, num_tokens(one))
        assert not sample.is_whole
        assert sample.num_tokens <= 300
        assert all(len(group) == 4 for group in sample.groups().values())
        kept.append(set(sample.groups()))
    assert kept[0] == kept[1]
    assert 5 <= len(kept[0]) < 12


def test_a_prompt_is_held_and_counted_once_in_its_group() -> None:
    """Prompts of 1000 tokens: 40 groups of 4 hold 40 of them, and each response 10 more."""
    rows = [
        replace(
            response(float(number % 2), [0.0] * 10, group=str(number // 4), place=number),
            prompt_ids=tuple(range(number // 4, number // 4 + 1000)),
            response_ids=(1,) * 10,
        )
        for number in range(160)
    ]
    found = collect_findings(rows, max_tokens=10_500)
    groups = list(found.sample.values())
    assert len(groups) == 10
    assert all(len({id(one.prompt_ids) for one in group}) == 1 for group in groups)
    apart = [replace(one, prompt=str(number)) for number, one in enumerate(rows)]
    assert [one.prompt for one in collect_findings(apart[:8]).responses] == list(map(str, range(8)))
    assert len(collect_findings(apart, max_tokens=10_500).sample) == 2


def test_a_stream_is_not_held() -> None:
    """Counts and explained variance are of all rows, the sample of some."""
    responses = made_up.sound(num_prompts=100)
    stream: list[InspectedResponse | BadRow] = [*responses, BadRow("a.jsonl, row 9", "no reward")]
    found = collect_findings(iter(stream), max_tokens=1000)
    assert found.sums.num == 800
    assert not found.is_whole
    assert len(found.responses) < 200
    assert found.num_bad_rows == 1
    everything = of(responses)
    assert found.sums.explained.value == pytest.approx(everything.explained.value)


def test_parts_are_steps_or_files() -> None:
    one, two = made_up.sound(10, step=2), made_up.sound(10, step=1)
    other = [replace(r, place=r.place.replace("made_up", "other")) for r in two]
    found = collect_findings([*one, *other])
    assert [(part.file, part.step) for part in found.parts] == [
        ("other.jsonl", 1),
        ("made_up.jsonl", 2),
    ]
    assert collect_findings(one).parts == []


def test_the_sums_of_all_are_those_of_the_parts_together() -> None:
    """Two steps, the second of other rewards, lengths and faults, beside both as one."""
    first = [replace(one, reward=one.reward / 2) for one in made_up.sound(9)]
    second = [
        replace(one, group=f"{one.group} again", is_truncated=True)
        for one in made_up.sound(7, seed=1)
    ]
    second[3] = replace(second[3], values=None, not_finite=("values",))
    together = collect_findings([*first, *second])
    apart = collect_findings(
        [replace(one, step=i) for i, rows in enumerate((first, second)) for one in rows]
    )
    one, other = together.sums, apart.sums
    assert len(apart.parts) == 2
    for name in ("low", "high", "longest", "tokens", "num", "num_truncated", "num_logprobs"):
        assert getattr(one, name) == getattr(other, name), name
    assert (one.rewards, one.not_finite) == (other.rewards, other.not_finite)
    assert other.not_finite["values"] == NotFinite(1, second[3].place)
    assert one.explained.value == pytest.approx(other.explained.value)
    assert [x.mean for x in one.micro_batches] == pytest.approx(
        [x.mean for x in other.micro_batches], nan_ok=True
    )
    assert apart.groups.num_groups == 16
    assert apart.groups.all_equal == together.groups.all_equal
    assert (other.low, other.high) == (-1.0, 1.0)
    parts = {part.step: part.sums for part in apart.parts}
    assert (parts[0].low, parts[1].low, parts[0].num, parts[1].num) == (-0.5, -1.0, 72, 56)
