"""`algorithm.surrogate` dis and dppo_tv through the objective, and lambda by k."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.systems import estimated, made_up_batch, system_config, system_loss
from vapo.advantages.estimators import policy_lambda
from vapo.config import FitConfig, resolve
from vapo.diagnostics.iteration_metrics import reward_weight
from vapo.training.minibatches import make_minibatches
from vapo.training.objective import Totals, policy_objective
from vapo.types import TrainingBatch

COMMON = (
    "components.clip_higher.enabled=false",
    "components.positive_example_lm_loss.enabled=false",
)
DIS = (*COMMON, "algorithm.surrogate=dis")
DPPO = (*COMMON, "algorithm.surrogate=dppo_tv")


def four_tokens(
    config: FitConfig, probabilities: list[float], rollout: list[float], advantages: list[float]
) -> tuple[TrainingBatch, torch.Tensor]:
    """One response of four tokens; the policy's probabilities and the engine's."""
    batch, _ = made_up_batch(config, num_groups=1, group_size=1)
    assert batch.response_mask.shape[1] >= 4
    made = estimated(config, batch)
    mask = torch.zeros_like(batch.response_mask)
    mask[0, :4] = True

    def column(numbers: list[float]) -> torch.Tensor:
        filled = torch.zeros(batch.response_mask.shape, dtype=torch.float64)
        filled[0, :4] = torch.tensor(numbers, dtype=torch.float64)
        return filled

    logs = column([math.log(p) for p in probabilities])
    made = replace(
        made,
        loss_mask=mask,
        policy_mask=mask,
        rollout_logprobs=column([math.log(p) for p in rollout]),
        old_logprobs=logs - 1.0,  # of no account
        advantages=column(advantages),
    )
    return made, logs.requires_grad_()


def rejected_share(config: FitConfig, batch: TrainingBatch, logprobs: torch.Tensor) -> float:
    carrier = replace(batch, old_values=logprobs)
    (minibatch,) = make_minibatches(carrier, num_minibatches=1, max_tokens=99, pad_id=0, seed=0)
    totals = Totals()
    for micro in minibatch.microbatches:
        carried = micro.rows.old_values
        assert carried is not None
        numbers, entropy = resolve(config), torch.zeros_like(carried)
        policy_objective(carried, entropy, micro.rows, minibatch, numbers, config.algorithm, totals)
    found = totals.reduce()
    assert "actor/clip_fraction_low" not in found
    return found["actor/rejected_share"]


def test_dis_by_hand() -> None:
    """SAO's check: ratios .7, .8, 2, 6 give f = 0, .8, 2, 0, and rejected tokens are counted."""
    config = system_config("vapo", *DIS)
    ratios = [0.7, 0.8, 2.0, 6.0]
    batch, logprobs = four_tokens(config, [0.5] * 4, [0.5 / r for r in ratios], [1.0] * 4)
    loss = system_loss(config, batch, logprobs)
    assert float(loss.detach()) == pytest.approx(2.8 * math.log(2) / 4)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0, :4].tolist() == pytest.approx([0.0, -0.2, -0.5, 0.0])
    assert rejected_share(config, batch, logprobs.detach()) == 0.5
    narrow = system_config("vapo", *DIS, "algorithm.dis_eps_high=0.5")
    assert rejected_share(narrow, batch, logprobs.detach()) == 0.75


def test_dppo_by_hand() -> None:
    """BPCO's checks: coefficients 0, 1.5, 0 and 1.5 of (mu, pi, A)."""
    config = system_config("vapo", *DPPO)
    rollout, policy, advantages = [0.5, 0.05, 0.5, 0.5], [0.75, 0.075, 0.25, 0.75], [1, 1, -1, -1]
    batch, logprobs = four_tokens(config, policy, rollout, [float(a) for a in advantages])
    loss = system_loss(config, batch, logprobs)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0, :4].tolist() == pytest.approx([0.0, -1.5 / 4, 0.0, 1.5 / 4])
    assert rejected_share(config, batch, logprobs.detach()) == 0.5
    as_sum = ("components.token_level_loss.enabled=false", "algorithm.sequence_reduction=sum")
    summed = system_config("vapo", *DPPO, *as_sum)
    whole = system_loss(summed, batch, logprobs.detach())
    assert float(whole) == pytest.approx(4 * float(loss.detach())), "one response: its sum over 1"


@pytest.mark.parametrize("surrogate", [DIS, DPPO])
def test_they_do_not_depend_on_the_cut(surrogate: tuple[str, ...]) -> None:
    config = system_config("vapo", *surrogate)
    batch, logprobs = made_up_batch(config)
    assert batch.old_logprobs is not None
    near = estimated(config, replace(batch, rollout_logprobs=batch.old_logprobs))
    gradients: list[torch.Tensor] = []
    for max_tokens in (10_000, 25):
        logprobs.grad = None
        system_loss(config, near, logprobs, max_tokens=max_tokens).backward()
        assert logprobs.grad is not None
        gradients.append(logprobs.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1])
    assert float(gradients[0].abs().sum()) > 0


def test_lambda_by_k_and_its_weight_at_the_first_token() -> None:
    """k^(1/l); the reward's weight is lambda^(l - 1) = k^((l - 1) / l), the mean over responses."""
    config = system_config("vapo", "components.length_adaptive_gae.k=0.5")
    batch, _ = made_up_batch(config)
    lengths = batch.response_lengths.double()
    made = policy_lambda(batch, resolve(config))
    assert isinstance(made, torch.Tensor)
    torch.testing.assert_close(made[:, 0].double(), 0.5 ** (1 / lengths), rtol=1e-6, atol=0)
    expected = float((0.5 ** ((lengths - 1) / lengths)).mean())
    assert reward_weight(estimated(config, batch), resolve(config)) == pytest.approx(expected)
    constant = system_config("vapo", "components.length_adaptive_gae.enabled=false")
    expected = float((0.95 ** (lengths - 1)).mean())
    assert reward_weight(estimated(constant, batch), resolve(constant)) == pytest.approx(expected)
