"""A minibatch's gradient does not depend on how it is cut or over how many processes it is spread.

Through the real module, losses and Trainer; policy, positive-example LM, value loss, whitening
and the metrics included.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.forked import Ranks
from tests.invariance.gradients import compute

ONE_FORWARD, MANY = 100_000, 40
SEQUENCE_LEVEL = "components.token_level_loss.enabled=false"
PADDED, PACKED = "training.packing=padded", "training.packing=packed"
NO_CLIP = "components.clip_higher.enabled=false"
GSPO = (SEQUENCE_LEVEL, NO_CLIP, "algorithm.surrogate=gspo")
CISPO = (NO_CLIP, "algorithm.surrogate=cispo", "algorithm.cispo_eps_high=0.1")
CORRECTED = ("algorithm.mismatch.tis_cap=1.1", "algorithm.mismatch.mask_below=0.98")


def largest_relative_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """max over parameters of |a - b| / |a|, in the L2 norm of each parameter."""
    assert a.keys() == b.keys()
    norms = {key: float(a[key].norm()) for key in a}
    assert min(norms.values()) > 0, "a parameter without gradient compares nothing"
    return max(float((a[key] - b[key]).norm()) / norms[key] for key in a)


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return compute(1, ONE_FORWARD, PADDED)


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert largest_relative_difference(a["gradients"], b["gradients"]) < 1e-5
    assert a["metrics"].keys() == b["metrics"].keys()
    for key, value in a["metrics"].items():
        assert b["metrics"][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_the_made_up_minibatch_exercises_every_term(whole: dict[str, Any]) -> None:
    metrics = whole["metrics"]
    assert metrics["actor/clip_fraction_low"] > 0
    assert metrics["actor/clip_fraction_high"] > 0
    assert metrics["actor/positive_example_lm_loss"] > 0
    assert metrics["critic/value_loss"] > 0


@pytest.mark.parametrize(
    ("budget", "layout"), [(ONE_FORWARD, PACKED), (MANY, PADDED), (MANY, PACKED)]
)
def test_many_microbatches_packed_or_padded_equal_one_padded(
    whole: dict[str, Any], budget: int, layout: str
) -> None:
    assert_same(whole, compute(1, budget, layout))


def test_sequence_level_loss_too_and_it_is_another_gradient(whole: dict[str, Any]) -> None:
    one = compute(1, ONE_FORWARD, SEQUENCE_LEVEL)
    assert_same(one, compute(1, MANY, SEQUENCE_LEVEL))
    assert largest_relative_difference(one["gradients"], whole["gradients"]) > 1e-2


@pytest.mark.parametrize("reduction", [(), pytest.param((SEQUENCE_LEVEL,), marks=pytest.mark.slow)])
def test_the_mismatch_correction_does_not_depend_on_the_cut(
    whole: dict[str, Any], reduction: tuple[str, ...]
) -> None:
    one = compute(1, ONE_FORWARD, *CORRECTED, *reduction)
    assert 0.1 < one["metrics"]["rollout/mismatch_masked_share"] < 0.9
    assert 0.1 < one["metrics"]["rollout/mismatch_clipped_share"] < 0.9
    assert_same(one, compute(1, MANY, *CORRECTED, *reduction))
    assert largest_relative_difference(one["gradients"], whole["gradients"]) > 1e-2


def test_the_mismatch_correction_leaves_the_critic_alone(whole: dict[str, Any]) -> None:
    corrected = compute(1, ONE_FORWARD, *CORRECTED, PADDED)["gradients"]
    for key, gradient in whole["gradients"].items():
        assert torch.equal(gradient, corrected[key]) == key.startswith("critic."), key


@pytest.mark.parametrize(
    "surrogate",
    [pytest.param(GSPO, id="gspo"), pytest.param(CISPO, marks=pytest.mark.slow, id="cispo")],
)
def test_the_ratio_of_a_response_does_not_depend_on_the_cut(
    whole: dict[str, Any], surrogate: tuple[str, ...]
) -> None:
    """Nor do its weights: a response is never cut, so each part has all tokens of its rows."""
    one = compute(1, ONE_FORWARD, *surrogate, PADDED)
    assert 0.1 < one["metrics"]["actor/clip_fraction_high"] < 0.9
    assert_same(one, compute(1, MANY, *surrogate, PACKED))
    assert largest_relative_difference(one["gradients"], whole["gradients"]) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "overrides"),
    [
        pytest.param(ONE_FORWARD, (PADDED,), marks=pytest.mark.night),
        (MANY, (PACKED,)),
        (MANY, (*CORRECTED, PACKED)),
    ],
)
def test_two_sharded_processes_equal_one(
    whole: dict[str, Any], two_ranks: Ranks, budget: int, overrides: tuple[str, ...]
) -> None:
    sharded, _ = two_ranks.run(compute, 2, budget, *overrides)
    is_corrected = CORRECTED[0] in overrides
    one = compute(1, ONE_FORWARD, *CORRECTED, PADDED) if is_corrected else whole
    assert_same(one, sharded)
