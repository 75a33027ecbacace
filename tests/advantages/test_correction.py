"""The correction in the shipped objective: by hand, on and off, and on every system."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.judged import judged_batch
from tests.rollout_fixtures import make_rollouts
from tests.systems import (
    CRITIC_FREE,
    estimated,
    made_up_batch,
    mostly_slow,
    system_config,
    system_loss,
    with_columns,
)
from vapo.advantages.mismatch_correction import (
    correct_mismatch,
    correction_metrics,
    mismatch_metrics,
)
from vapo.config import FitConfig, resolve
from vapo.config.algorithm import MismatchConfig
from vapo.environments.contract import Verdict
from vapo.training.minibatches import make_minibatches
from vapo.training.objective import Totals, policy_objective
from vapo.types import EvaluatedBatch, FinishReason, Prompt, Rollout, TrainingBatch

CAP_2 = MismatchConfig(tis_cap=2.0)


def two_responses() -> TrainingBatch:
    """Token ratios pi_old / pi_rollout 3, 1/2 and 1/4; advantages 1, 1 and 2. Both correct."""
    prompt = Prompt("p", "", (2, 3), "1")
    rollouts = [
        Rollout(prompt, (4, 5), "", (-2.0, -2.0), FinishReason.STOP),
        Rollout(prompt, (6,), "", (-2.0,), FinishReason.STOP),
    ]
    batch = judged_batch(
        rollouts,
        [Verdict(True, 1.0), Verdict(True, 1.0)],
        rewards=system_config("vapo").rewards,
        max_response_tokens=4,
    )
    ratios = torch.tensor([[3.0, 0.5], [0.25, 1.0]])
    return with_columns(
        batch,
        old_logprobs=torch.where(batch.response_mask, ratios.log() - 2.0, 0.0),
        advantages=torch.tensor([[1.0, 1.0], [2.0, 0.0]]),
    )


def metrics_and_gradient(
    correction: MismatchConfig, *overrides: str
) -> tuple[dict[str, float], Tensor]:
    """Of one minibatch at ratio pi_theta / pi_old = 1."""
    config = system_config("vapo", *overrides)
    batch = correct_mismatch(two_responses(), correction)
    assert batch.old_logprobs is not None
    logprobs = batch.old_logprobs.clone().requires_grad_()
    carrier = replace(batch, old_values=logprobs)
    (minibatch,) = make_minibatches(carrier, num_minibatches=1, max_tokens=99, pad_id=0, seed=0)
    totals = Totals()
    loss = torch.zeros(())
    for micro in minibatch.microbatches:
        carried = micro.rows.old_values
        assert carried is not None
        loss = loss + policy_objective(
            carried,
            torch.ones_like(carried),
            micro.rows,
            minibatch,
            resolve(config),
            config.algorithm,
            totals,
        )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return totals.reduce(), gradient


def test_token_weights_in_the_loss_by_hand() -> None:
    # weights 2 (3 capped), 1/2, 1/4 on losses -1, -1, -2; 3 tokens
    metrics, gradient = metrics_and_gradient(CAP_2)
    assert metrics["actor/policy_loss"] == pytest.approx(-(2 + 0.5 + 0.5) / 3)
    lm = 0.1 / 3  # mu / tokens of correct responses: as without the correction
    expected = torch.tensor([[-2 / 3 - lm, -0.5 / 3 - lm], [-0.5 / 3 - lm, 0.0]])
    torch.testing.assert_close(gradient, expected)


ICEPOP = MismatchConfig(icepop=True, icepop_low=0.5, icepop_high=2.0)


def test_icepop_in_the_loss_by_hand() -> None:
    """Ratios 3, 1/2, 1/4: 3 and 1/4 leave the band, and are counted among the 3 tokens."""
    metrics, gradient = metrics_and_gradient(ICEPOP)
    assert metrics["actor/policy_loss"] == pytest.approx(-0.5 / 3)
    lm = 0.1 / 3  # all three tokens keep their positive-example LM loss
    expected = torch.tensor([[-lm, -0.5 / 3 - lm], [-lm, 0.0]])
    torch.testing.assert_close(gradient, expected)
    wide = MismatchConfig(icepop=True)
    metrics, _ = metrics_and_gradient(wide)  # 0.5 to 5: the ratio itself, which has no cap
    assert metrics["actor/policy_loss"] == pytest.approx(-(3 + 0.5) / 3)


def test_the_share_of_tokens_that_icepop_drops() -> None:
    found = correction_metrics(correct_mismatch(two_responses(), ICEPOP), ICEPOP)
    assert found == pytest.approx(
        {
            "rollout/effective_sample_share": (3 + 0.5 + 0.25) ** 2 / 3 / (9 + 0.25 + 0.0625),
            "rollout/mismatch_weight_mean": 0.5 / 3,
            "rollout/mismatch_masked_token_share": 2 / 3,
        }
    )


def test_icepop_beside_the_mask_of_responses() -> None:
    """The second response is out, so that one of two tokens is dropped."""
    both = MismatchConfig(icepop=True, icepop_high=2.0, mask_below=0.5)
    found = correction_metrics(correct_mismatch(two_responses(), both), both)
    assert found["rollout/mismatch_masked_share"] == 0.5
    assert found["rollout/mismatch_masked_token_share"] == 0.5


def test_a_masked_response_is_not_counted_by_hand() -> None:
    # geometric means sqrt(3/2) and 1/4: the second response is out
    metrics, gradient = metrics_and_gradient(MismatchConfig(mask_below=0.5))
    assert metrics["actor/policy_loss"] == pytest.approx(-(1 + 1) / 2)
    lm = 0.1 / 3  # all three tokens keep their positive-example LM loss
    expected = torch.tensor([[-0.5 - lm, -0.5 - lm], [-lm, 0.0]])
    torch.testing.assert_close(gradient, expected)
    assert metrics["actor/entropy"] == pytest.approx(1.0)


def test_a_masked_response_is_not_counted_at_sequence_level_either() -> None:
    off = "components.token_level_loss.enabled=false"
    metrics, _ = metrics_and_gradient(MismatchConfig(mask_below=0.5), off)
    assert metrics["actor/policy_loss"] == pytest.approx(-1.0)


def test_everything_masked_leaves_no_policy_gradient() -> None:
    outside = MismatchConfig(mask_below=0.999, mask_above=1.001)
    metrics, gradient = metrics_and_gradient(outside)
    assert metrics["actor/policy_loss"] == 0.0
    lm = 0.1 / 3
    torch.testing.assert_close(gradient, torch.tensor([[-lm, -lm], [-lm, 0.0]]))


def test_metrics_by_hand() -> None:
    correction = MismatchConfig(tis_cap=2.0, mask_below=0.5)
    batch = correct_mismatch(two_responses(), correction)
    metrics = correction_metrics(batch, correction)
    assert metrics == pytest.approx(
        {
            "rollout/effective_sample_share": (3 + 0.5 + 0.25) ** 2 / 3 / (9 + 0.25 + 0.0625),
            "rollout/mismatch_masked_share": 0.5,
            "rollout/mismatch_weight_mean": (2.0 + 0.5) / 2,
            "rollout/mismatch_clipped_share": 0.5,
        }
    )
    assert mismatch_metrics(batch)["rollout/mismatch_ratio_max"] == pytest.approx(3.0)


def test_the_effective_sample_is_that_of_the_weights_in_use() -> None:
    """Of whole responses: 3 * 0.5 on both tokens of the first, 0.25 on that of the second."""
    batch, share = two_responses(), "rollout/effective_sample_share"
    whole = MismatchConfig(tis_cap=2.0, tis_level="sequence")
    assert correction_metrics(correct_mismatch(batch, whole), whole)[share] == pytest.approx(
        (1.5 + 1.5 + 0.25) ** 2 / 3 / (2.25 + 2.25 + 0.0625)
    )


def test_off_fills_nothing_and_value_pretraining_neither() -> None:
    batch, on = two_responses(), MismatchConfig(tis_cap=2.0, mask_below=0.5)
    assert correct_mismatch(batch, MismatchConfig()) is batch
    assert batch.importance_weights.eq(1).all()
    assert batch.policy_mask is batch.loss_mask
    assert correction_metrics(batch, MismatchConfig()).keys() == {"rollout/effective_sample_share"}
    pretraining = replace(batch, old_logprobs=None)
    assert correct_mismatch(pretraining, on) is pretraining
    assert correction_metrics(pretraining, on) == {}
    assert mismatch_metrics(pretraining) == {}


def test_filtered_responses_stay_filtered_and_are_not_counted() -> None:
    batch, correction = two_responses(), MismatchConfig(tis_cap=2.0, mask_above=1.1)
    loss_mask = batch.response_mask & torch.tensor([[False], [True]])
    batch = correct_mismatch(replace(batch, loss_mask=loss_mask), correction)
    assert batch.policy_mask.tolist() == [[False, False], [True, False]]
    assert correction_metrics(batch, correction)["rollout/mismatch_masked_share"] == 0.0


def gradient_of(
    config: FitConfig, batch: TrainingBatch, logprobs: Tensor, **options: Any
) -> Tensor:
    (gradient,) = torch.autograd.grad(system_loss(config, batch, logprobs, **options), logprobs)
    return gradient


@pytest.mark.parametrize("system", mostly_slow(["vapo", "ppo", "vc_ppo", *CRITIC_FREE]))
def test_an_engine_that_agrees_changes_no_bit(system: str) -> None:
    """Weights are exactly 1 and nobody is out of range where pi_rollout is pi_old."""
    config = system_config(system)
    made, logprobs = made_up_batch(config)
    assert made.old_logprobs is not None
    batch = estimated(config, replace(made, rollout_logprobs=made.old_logprobs))
    off = gradient_of(config, batch, logprobs)
    tight = MismatchConfig(tis_cap=1.0, mask_below=0.999, mask_above=1.001)
    assert torch.equal(gradient_of(config, correct_mismatch(batch, tight), logprobs), off)
    icepop = MismatchConfig(icepop=True, icepop_low=1.0, icepop_high=1.0)
    assert torch.equal(gradient_of(config, correct_mismatch(batch, icepop), logprobs), off)


@pytest.mark.parametrize("system", mostly_slow(CRITIC_FREE))
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_system_is_corrected_and_the_cut_does_not_matter(system: str, level: Any) -> None:
    config = system_config(system)
    made, logprobs = made_up_batch(config)
    batch = estimated(config, made)
    off = gradient_of(config, batch, logprobs)
    assert batch.old_logprobs is not None
    noise = torch.randn(off.shape, dtype=off.dtype, generator=torch.Generator().manual_seed(1))
    batch = replace(batch, rollout_logprobs=batch.old_logprobs + 0.5 * noise)
    correction = MismatchConfig(tis_cap=2.0, tis_level=level, mask_above=1.2)
    batch = correct_mismatch(batch, correction)
    on = gradient_of(config, batch, logprobs)
    assert float((on - off).norm() / off.norm()) > 0.05
    cut = gradient_of(config, batch, logprobs, max_tokens=16)
    torch.testing.assert_close(cut, on, rtol=1e-10, atol=1e-12)


def test_the_engines_logprobs_reach_the_batch() -> None:
    """Negative control of the batch itself: with the engine's numbers lost there is no gap."""
    rollouts, verdicts = make_rollouts(8, vocab_size=30)
    batch = judged_batch(
        rollouts, verdicts, rewards=system_config("vapo").rewards, max_response_tokens=32
    )
    old_logprobs = torch.where(batch.response_mask, batch.rollout_logprobs + 0.5, 0.0)
    metrics = mismatch_metrics(EvaluatedBatch(**vars(batch), old_logprobs=old_logprobs))
    assert metrics["rollout/logprob_gap_mean"] == pytest.approx(0.5, abs=1e-6)
    assert metrics["rollout/mismatch_sequence_ratio_std"] == pytest.approx(0.0, abs=1e-6)
