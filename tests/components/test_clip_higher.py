"""Component clip_higher: an upper clip bound above the lower one."""

import pytest
import torch

from vapo.functional.losses import clipped_surrogate


def losses_of(ratios: list[float], advantages: list[float], **bounds: float) -> torch.Tensor:
    logprobs = torch.tensor([ratios], dtype=torch.float64).log()
    a = torch.tensor([advantages], dtype=torch.float64)
    return clipped_surrogate(logprobs, torch.zeros_like(logprobs), a, **bounds)


RATIOS = [1.0, 1.25, 1.5, 0.9, 0.5, 1.25, 1.5, 0.9, 0.5]
ADVANTAGES = [2.0, 2.0, 2.0, 2.0, 2.0, -2.0, -2.0, -2.0, -2.0]


def test_on_by_hand() -> None:
    # A > 0 is held at 1.28 * A from above; A < 0 at 0.8 * A from below; nothing else is touched
    expected = [-2.0, -2.5, -2.56, -1.8, -1.0, 2.5, 3.0, 1.8, 1.6]
    actual = losses_of(RATIOS, ADVANTAGES, eps_low=0.2, eps_high=0.28)
    assert actual[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_off_by_hand() -> None:
    expected = [-2.0, -2.4, -2.4, -1.8, -1.0, 2.5, 3.0, 1.8, 1.6]
    actual = losses_of(RATIOS, ADVANTAGES, eps_low=0.2, eps_high=0.2)
    assert actual[0].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_off_is_plain_ppo_bitwise(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 50, dtype=dtype, generator=generator)
    new = (old + 0.4 * torch.randn(6, 50, dtype=dtype, generator=generator)).requires_grad_()
    a = torch.randn(6, 50, dtype=dtype, generator=generator)
    off = clipped_surrogate(new, old, a, eps_low=0.2, eps_high=0.2)
    ratio = (new - old).exp()
    plain = torch.maximum(-a * ratio, -a * ratio.clamp(1 - 0.2, 1 + 0.2))
    assert torch.equal(off, plain)
    (off_grad,) = torch.autograd.grad(off.sum(), new)
    (plain_grad,) = torch.autograd.grad(plain.sum(), new)
    assert torch.equal(off_grad, plain_grad)


def test_the_gradient_stops_exactly_at_the_bounds() -> None:
    ratios = [1.27, 1.29, 0.81, 0.79, 1.29, 0.79]
    advantages = [1.0, 1.0, -1.0, -1.0, -1.0, 1.0]
    logprobs = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    a = torch.tensor([advantages], dtype=torch.float64)
    zeros = torch.zeros(1, 6, dtype=torch.float64)
    clipped_surrogate(logprobs, zeros, a, eps_low=0.2, eps_high=0.28).sum().backward()
    assert logprobs.grad is not None
    # d loss / d logprob = -ratio * A where not clipped
    assert logprobs.grad[0].tolist() == pytest.approx([-1.27, 0, 0.81, 0, 1.29, -0.79], abs=1e-12)


def climb(eps_high: float, probability: float) -> float:
    """Probability after many small ascent steps on one token with A = 1 (DAPO 3.1)."""
    other = torch.log(torch.tensor(1.0 - probability, dtype=torch.float64))
    start = torch.log(torch.tensor(probability, dtype=torch.float64)) - other
    old = torch.tensor([[probability]], dtype=torch.float64).log()
    logit = start.clone().requires_grad_()
    for _ in range(1000):
        loss = clipped_surrogate(
            torch.nn.functional.logsigmoid(logit).reshape(1, 1),
            old,
            torch.ones_like(old),
            eps_low=0.2,
            eps_high=eps_high,
        )
        (grad,) = torch.autograd.grad(loss.sum(), logit)
        if grad == 0:
            break
        logit = (logit - 0.0005 * grad).detach().requires_grad_()
    return torch.sigmoid(logit).item()


@pytest.mark.slow
def test_negative_control_off_a_rare_good_token_is_stopped_sooner() -> None:
    # From 0.01 a good token can rise to 0.012 within one rollout batch, and to 0.0128 with the
    # higher bound, while a token at 0.9 can go to 1 either way: the bound binds exploration.
    assert climb(0.2, 0.01) == pytest.approx(0.012, rel=1e-3)
    assert climb(0.28, 0.01) == pytest.approx(0.0128, rel=1e-3)
    assert climb(0.2, 0.9) == pytest.approx(climb(0.28, 0.9), abs=1e-12)
    assert climb(0.2, 0.9) > 0.9
