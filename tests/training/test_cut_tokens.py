"""What GSPO, CISPO and IcePop cut, through the objective: losses, gradients and metrics by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.systems import estimated, made_up_batch, system_config, system_loss
from vapo.config import FitConfig, resolve
from vapo.training.minibatches import make_minibatches
from vapo.training.objective import Totals, has_loss, policy_objective
from vapo.types import TrainingBatch

LENGTHS = (3, 1, 2)
# log pi - log old; their means over a response are 0.2, -0.3 and 0
LOG_RATIOS = [[0.9, -0.6, 0.3], [-0.3, 0.0, 0.0], [1.0, -1.0, 0.0]]


def three_responses(
    config: FitConfig, advantages: list[list[float]]
) -> tuple[TrainingBatch, Tensor]:
    """Responses of 3, 1 and 2 tokens, and the update's log-probs of these."""
    batch, _ = made_up_batch(config, num_groups=1, group_size=3)
    mask = torch.arange(3) < torch.tensor(LENGTHS)[:, None]
    zeros = torch.zeros(3, 3, dtype=torch.float64)
    width = batch.response_mask.shape[1]

    def widened(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, width - 3))

    old = zeros - 2.0
    columns: dict[str, Any] = {
        name: widened(torch.where(mask, x, 0.0))
        for name, x in (("old_logprobs", old), ("advantages", torch.tensor(advantages).double()))
    }
    columns |= dict.fromkeys(("response_mask", "loss_mask", "policy_mask"), widened(mask))
    made = replace(estimated(config, batch), **columns)
    logprobs = widened(torch.where(mask, old + torch.tensor(LOG_RATIOS).double(), 0.0))
    return made, logprobs.requires_grad_()


def metrics_of(
    config: FitConfig, batch: TrainingBatch, logprobs: Tensor, max_tokens: int = 999
) -> dict[str, float]:
    carrier = replace(batch, old_values=logprobs.detach())
    (minibatch,) = make_minibatches(
        carrier, num_minibatches=1, max_tokens=max_tokens, pad_id=0, seed=0
    )
    assert (len(minibatch.microbatches) > 1) == (max_tokens == 6)
    totals, numbers = Totals(), replace(resolve(config), reads_old_logprobs=True)
    for micro in minibatch.microbatches:
        carried = micro.rows.old_values
        assert carried is not None
        entropy = torch.zeros_like(carried)
        policy_objective(carried, entropy, micro.rows, minibatch, numbers, config.algorithm, totals)
    return totals.reduce()


def gspo_config(*overrides: str) -> FitConfig:
    bounds = ("algorithm.gspo_eps_low=0.1", "algorithm.gspo_eps_high=0.1")
    return system_config("gspo", *bounds, *overrides)


def test_gspo_counts_the_responses_that_are_clipped() -> None:
    """s = e^0.2, e^-0.3, 1 with A = 1, -1, 1: the first is cut above, the second below."""
    config = gspo_config()
    batch, logprobs = three_responses(config, [[1.0] * 3, [-1.0] * 3, [1.0] * 3])
    loss = system_loss(config, batch, logprobs)
    assert float(loss.detach()) == pytest.approx((-1.1 + 0.9 - 1.0) / 3)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient[:, :3].tolist() == [[0, 0, 0], [0, 0, 0], pytest.approx([-1 / 6, -1 / 6, 0])]
    for max_tokens in (999, 6):
        metrics = metrics_of(config, batch, logprobs, max_tokens)
        assert metrics["actor/clip_fraction_high"] == pytest.approx(1 / 3)
        assert metrics["actor/clip_fraction_low"] == pytest.approx(1 / 3)
        assert metrics["actor/ratio_max"] == pytest.approx(torch.tensor(1.0).exp().item())


def test_gspo_counts_a_response_by_the_share_of_its_tokens_that_are_cut() -> None:
    """The first response's advantages are 1, -1, 1: two of its three tokens are cut."""
    config = gspo_config()
    batch, logprobs = three_responses(config, [[1.0, -1.0, 1.0], [1.0] * 3, [1.0] * 3])
    metrics = metrics_of(config, batch, logprobs)
    assert metrics["actor/clip_fraction_high"] == pytest.approx(2 / 3 / 3)
    assert metrics["actor/clip_fraction_low"] == 0.0


def test_the_ratio_of_a_response_has_its_tokens_without_loss() -> None:
    """As where critics agree on them: the mean log-ratio stays 0.2, over all three tokens."""
    config = gspo_config()
    batch, logprobs = three_responses(config, [[-1.0] * 3, [0.0] * 3, [0.0] * 3])
    policy_mask = batch.policy_mask.clone()
    policy_mask[0, :2] = False
    batch = replace(batch, policy_mask=policy_mask)
    loss = system_loss(config, batch, logprobs)
    assert float(loss.detach()) == pytest.approx(torch.tensor(0.2).double().exp().item() / 3)


def test_cispo_counts_the_tokens_whose_weight_is_at_a_bound() -> None:
    """Token ratios e^0.9 and e^1 are above 2, e^-0.6 and e^-1 below 0.6; A has no say."""
    bounds = ("algorithm.cispo_eps_high=1", "algorithm.cispo_eps_low=0.4")
    config = system_config("cispo", *bounds)
    batch, logprobs = three_responses(config, [[1.0] * 3, [-1.0] * 3, [-2.0] * 3])
    for max_tokens in (999, 6):
        metrics = metrics_of(config, batch, logprobs, max_tokens)
        assert metrics["actor/clip_fraction_high"] == pytest.approx(2 / 6)
        assert metrics["actor/clip_fraction_low"] == pytest.approx(2 / 6)
    (gradient,) = torch.autograd.grad(system_loss(config, batch, logprobs), logprobs)
    ratios = torch.tensor(LOG_RATIOS).double().exp()
    weights = [[2.0, 0.6, ratios[0, 2]], [ratios[1, 0], 0, 0], [2.0, 0.6, 0]]
    scale = torch.tensor([[1.0], [-1.0], [-2.0]]).double() / 6
    expected = -torch.tensor(weights).double() * scale
    torch.testing.assert_close(gradient[:, :3], expected, rtol=0, atol=1e-7)
    free = system_config("cispo")
    assert metrics_of(free, batch, logprobs)["actor/clip_fraction_low"] == 0.0


def test_tokens_whose_importance_weight_is_0_give_no_reason_for_a_step() -> None:
    """A minibatch in which IcePop drops all has gradient 0, and a step would still move weights."""
    config = system_config("grpo", "algorithm.kl.coef=0")
    batch, _ = three_responses(config, [[1.0] * 3] * 3)
    numbers = resolve(config)
    for weight, expected in ((1.0, True), (0.0, False), (float("nan"), True)):
        weights = torch.full_like(batch.importance_weights, weight)
        weighed = replace(batch, importance_weights=weights)
        (minibatch,) = make_minibatches(
            weighed, num_minibatches=1, max_tokens=999, pad_id=0, seed=0
        )
        assert has_loss("actor", minibatch, numbers, config.algorithm) is expected
