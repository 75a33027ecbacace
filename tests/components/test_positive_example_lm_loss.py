"""Component positive_example_lm_loss: negative log-likelihood of the correct responses."""

import pytest
import torch

from vapo.functional.losses import aggregate, clipped_surrogate, positive_example_lm_loss

NAN = float("nan")
LOGPROBS = [[-1.0, -2.0, NAN], [-8.0, -8.0, -8.0], [-3.0, NAN, NAN]]
MASK = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
CORRECT = torch.tensor([True, False, True])


def leaf() -> torch.Tensor:
    return torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)


def test_on_divides_by_the_tokens_of_correct_responses() -> None:
    logprobs = leaf()
    loss = positive_example_lm_loss(logprobs, MASK, CORRECT)
    loss.backward()
    assert loss.item() == 2.0  # (1 + 2 + 3) / 3; by all six tokens it would be 1
    assert logprobs.grad is not None
    third = pytest.approx(-1 / 3, abs=1e-15)
    assert logprobs.grad.tolist() == [[third, third, 0], [0, 0, 0], [third, 0, 0]]


def test_no_correct_response_gives_zero_with_zero_gradient() -> None:
    logprobs = leaf()
    loss = positive_example_lm_loss(logprobs, MASK, torch.zeros(3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.abs().sum().item() == 0.0


def test_off_is_plain_ppo_bitwise() -> None:
    # mu = 0: value and gradient of L_PPO + mu * L_NLL are those of L_PPO
    advantages = torch.tensor([[1.0] * 3, [-1.0] * 3, [1.0] * 3], dtype=torch.float64)
    gradients, totals = [], []
    for mu in (None, 0.0):
        logprobs = leaf()
        surrogate = clipped_surrogate(
            logprobs, logprobs.detach() - 0.1, advantages, eps_low=0.2, eps_high=0.2
        )
        total = aggregate(surrogate, MASK, reduction="token_mean")
        if mu is not None:
            total = total + mu * positive_example_lm_loss(logprobs, MASK, CORRECT)
        total.backward()
        assert logprobs.grad is not None
        gradients.append(logprobs.grad)
        totals.append(total.detach())
    assert torch.equal(totals[0], totals[1])
    assert torch.equal(gradients[0], gradients[1])


def test_negative_control_off_a_correct_response_with_no_advantage_teaches_nothing() -> None:
    # A critic that predicts the return leaves advantage 0: PPO's gradient vanishes, and a rare
    # correct answer is not used. With mu = 0.1 its log-likelihood still rises.
    norms = []
    for mu in (0.0, 0.1):
        logprobs = leaf()
        surrogate = clipped_surrogate(
            logprobs, logprobs.detach(), torch.zeros(3, 3).double(), eps_low=0.2, eps_high=0.2
        )
        total = aggregate(surrogate, MASK, reduction="token_mean")
        (total + mu * positive_example_lm_loss(logprobs, MASK, CORRECT)).backward()
        assert logprobs.grad is not None
        assert logprobs.grad[1].tolist() == [0, 0, 0]  # the wrong response is not touched
        norms.append(logprobs.grad.abs().sum().item())
    assert norms == pytest.approx([0.0, 0.1], abs=1e-15)


def test_negative_control_own_denominators_scale_the_term_with_the_cut() -> None:
    # k micro-batches, each dividing by its own tokens: the term grows k-fold.
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(8, 5, dtype=torch.float64, generator=generator)
    mask, correct = torch.ones(8, 5, dtype=torch.bool), torch.ones(8, dtype=torch.bool)
    whole = positive_example_lm_loss(logprobs, mask, correct).item()
    for k in (2, 4, 8):
        parts = list(zip(logprobs.chunk(k), mask.chunk(k), correct.chunk(k), strict=True))
        wrong = sum(positive_example_lm_loss(*part).item() for part in parts)
        right = sum(positive_example_lm_loss(*part, denominator=40).item() for part in parts)
        assert wrong == pytest.approx(k * whole, rel=1e-12)
        assert right == pytest.approx(whole, rel=1e-12)
