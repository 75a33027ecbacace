"""The gradient of episodes with observations is that of their sampled tokens, and nothing else's.

Ours, from rollouts with turns through the batch, the real forward passes, advantages and losses;
against each sequence through the Hugging Face model, with the losses written out.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.forked import Ranks
from tests.invariance.episodes import by_hand, compute
from tests.invariance.test_gradients import (
    GSPO,
    MANY,
    ONE_FORWARD,
    PACKED,
    PADDED,
    assert_same,
    largest_relative_difference,
)

TURNS = (
    "environment.kind=function",
    "environment.function=my_games:Guess",
    "algorithm.gae_over=turns",
)
FILTERED = "rewards.overlong.filter_truncated=true"


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return compute(1, ONE_FORWARD, PADDED)


@pytest.fixture(scope="module")
def whole_turns() -> dict[str, Any]:
    return compute(1, ONE_FORWARD, PADDED, *TURNS)


def test_over_tokens_it_is_that_of_hand_built_sequences(whole: dict[str, Any]) -> None:
    assert largest_relative_difference(by_hand(), whole["gradients"]) < 1e-5
    assert whole["metrics"]["actor/clip_fraction_high"] > 0
    assert whole["metrics"]["actor/positive_example_lm_loss"] > 0


def test_over_turns_too_and_it_is_another_one(
    whole: dict[str, Any], whole_turns: dict[str, Any]
) -> None:
    expected = by_hand(over_turns=True)
    assert largest_relative_difference(expected, whole_turns["gradients"]) < 1e-5
    assert largest_relative_difference(whole["gradients"], whole_turns["gradients"]) > 1e-2


@pytest.mark.slow
def test_truncated_episodes_carry_no_loss_where_they_are_filtered() -> None:
    filtered = compute(1, MANY, PACKED, FILTERED)
    assert largest_relative_difference(by_hand(filters=True), filtered["gradients"]) < 1e-5


@pytest.mark.parametrize("budget", [ONE_FORWARD, MANY])
def test_many_microbatches_packed_equal_one_padded(whole: dict[str, Any], budget: int) -> None:
    assert_same(whole, compute(1, budget, PACKED))


@pytest.mark.slow
def test_the_ratio_of_an_episode_is_over_the_sampled_tokens_of_all_its_turns() -> None:
    one = compute(1, ONE_FORWARD, PADDED, *GSPO)
    assert one["metrics"]["actor/clip_fraction_high"] > 0
    assert_same(one, compute(1, MANY, PACKED, *GSPO))
    assert largest_relative_difference(by_hand(of_responses=True), one["gradients"]) < 1e-5


@pytest.mark.slow
def test_many_microbatches_packed_over_turns(whole_turns: dict[str, Any]) -> None:
    assert_same(whole_turns, compute(1, MANY, PACKED, *TURNS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "overrides"),
    [
        (MANY, (PACKED,)),
        pytest.param(ONE_FORWARD, (PADDED,), marks=pytest.mark.night),
        (ONE_FORWARD, (PADDED, *TURNS)),
    ],
)
def test_two_sharded_processes_equal_one(
    whole: dict[str, Any],
    whole_turns: dict[str, Any],
    two_ranks: Ranks,
    budget: int,
    overrides: tuple[str, ...],
) -> None:
    sharded, _ = two_ranks.run(compute, 2, budget, *overrides)
    assert_same(whole_turns if set(TURNS) <= set(overrides) else whole, sharded)
