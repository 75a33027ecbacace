"""GSPO and CISPO against their papers' formulas: hand-computed numbers, and slow loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.builders import equal, f64, gradient, mask
from vapo.functional.losses import aggregate
from vapo.functional.surrogates import cispo_surrogate, gspo_surrogate

NAN, INF = float("nan"), float("inf")
PAPER: dict[str, float] = {"eps_low": 3e-4, "eps_high": 4e-4}
WIDE: dict[str, float] = {"eps_low": 0.3, "eps_high": 0.2}
bounded = settings(max_examples=30, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31)


def gspo(
    new: Tensor, old: Tensor, advantages: Tensor, m: Tensor, *, eps_low: float, eps_high: float
) -> Tensor:
    """The loss of the responses."""
    losses = gspo_surrogate(new, old, advantages, m, eps_low=eps_low, eps_high=eps_high)
    return aggregate(losses, m, reduction="sequence_mean")


def made_up(seed: int, *, noise: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New and old log-probs and advantages of four responses, with gaps between turns."""
    draw = torch.Generator().manual_seed(seed)
    old, moved, advantages = torch.randn(3, 4, 7, generator=draw, dtype=torch.float64)
    m = torch.rand(4, 7, generator=draw) < 0.7
    m[:, 0] = True
    return (old + noise * moved).requires_grad_(), old, advantages, m


# Token ratios 2, 1/2, 2 | 1/4 | 4, 1/4: geometric means 2^(1/3), 1/4, 1
OLD = f64([-1, -2, -3], [-1, 0, 0], [-2, -1, 0])
RATIOS = f64([2, 0.5, 2], [0.25, 1, 1], [4, 0.25, 1])
MASK = mask("xxx", "x..", "xx.")


def new_logprobs() -> Tensor:
    return torch.where(MASK, OLD + RATIOS.log(), NAN).requires_grad_()


def test_gspo_by_hand() -> None:
    """Where the ratio is outside the band on the side to which A pushes it, there is no gradient.

    With A = 1, -2, 3: -min(2^(1/3), 1.2), -min(-0.5, -1.4), -3.
    """
    new, advantages = new_logprobs(), f64([1, 1, 1], [-2, NAN, NAN], [3, 3, INF])
    losses = gspo_surrogate(new, OLD, advantages, MASK, **WIDE)
    equal(losses[MASK].detach(), f64([-1.2, -1.2, -1.2, 1.4, -3, -3])[0])
    loss = aggregate(losses, MASK, reduction="sequence_mean")
    assert loss.item() == pytest.approx((-1.2 + 1.4 - 3) / 3, abs=1e-12)
    equal(gradient(loss, new), f64([0, 0, 0], [0, 0, 0], [-3 / 2 / 3, -3 / 2 / 3, 0]))


def test_gspo_on_the_other_side_of_the_advantage_keeps_its_gradient() -> None:
    """With A = -1, 2: the losses are 2^(1/3) and -0.5, the gradient of s is s a token's share."""
    new, advantages = new_logprobs(), f64([-1, -1, -1], [2, 0, 0], [0, 0, 0])
    loss = gspo(new, OLD, advantages, MASK, **WIDE)
    s = 2 ** (1 / 3)
    assert loss.item() == pytest.approx((s - 0.5) / 3, abs=1e-12)
    equal(gradient(loss, new), f64([s / 9, s / 9, s / 9], [-0.5 / 3, 0, 0], [0, 0, 0]))


@pytest.mark.parametrize(
    ("shift", "advantage", "is_cut"),
    [
        (3.9e-4, 1.0, False),
        (4.1e-4, 1.0, True),
        (4.1e-4, -1.0, False),
        (-2.9e-4, -1.0, False),
        (-3.1e-4, -1.0, True),
        (-3.1e-4, 1.0, False),
    ],
)
def test_the_papers_band_cuts_whole_responses(shift: float, advantage: float, is_cut: bool) -> None:
    """Two tokens that move by shift + 0.1 and shift - 0.1: their mean alone decides for both."""
    old = f64([-1, -2])
    new = (old + f64([shift + 0.1, shift - 0.1])).requires_grad_()
    loss = gspo(new, old, f64([advantage, advantage]), mask("xx"), **PAPER)
    expected = 0.0 if is_cut else -advantage * math.exp(shift) / 2
    equal(gradient(loss, new), f64([expected, expected]))


@bounded
@given(seeds)
def test_gspo_with_one_advantage_a_response_is_the_loss_of_the_response(seed: int) -> None:
    """Value and gradient, against a loop in which the ratio of the response is differentiated."""
    new, old, advantages, m = made_up(seed, noise=0.3)
    advantages = advantages[:, :1].expand(4, 7)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(4):
        places = [t for t in range(7) if m[row, t]]
        log_ratio = sum((new[row, t] - old[row, t] for t in places), total * 0) / len(places)
        s, a = log_ratio.exp(), advantages[row, 0]
        clipped = s.clamp(0.9, 1.15)
        total = total - torch.min(s * a, clipped * a) / 4
    ours = gspo(new, old, advantages, m, eps_low=0.1, eps_high=0.15)
    equal(ours.detach(), total.detach())
    equal(gradient(ours, new), gradient(total, new))


@bounded
@given(seeds)
def test_gspo_with_an_advantage_for_each_token_is_gspo_token(seed: int) -> None:
    new, old, advantages, m = made_up(seed, noise=0.3)
    expected, total = torch.zeros(4, 7, dtype=torch.float64), 0.0
    for row in range(4):
        places = [t for t in range(7) if m[row, t]]
        logs = [float(new[row, t].detach() - old[row, t]) for t in places]
        s = math.exp(sum(logs) / len(places))
        for t in places:
            a = float(advantages[row, t])
            is_cut = (a > 0 and s > 1.15) or (a < 0 and s < 0.9)
            total -= min(s * a, min(max(s, 0.9), 1.15) * a) / len(places) / 4
            expected[row, t] = 0.0 if is_cut else -s * a / len(places) / 4
    ours = gspo(new, old, advantages, m, eps_low=0.1, eps_high=0.15)
    assert ours.item() == pytest.approx(total, abs=1e-12)
    equal(gradient(ours, new), expected)
    assert expected.any()


def test_gspo_reads_the_sampled_tokens_alone_and_all_of_them() -> None:
    """What an environment wrote between two turns is in no mean; a token without loss is."""
    new = f64([0.5, NAN, 0.1, 77]).requires_grad_()
    old, advantages = f64([0, INF, 0, -INF]), f64([1, NAN, 2, NAN])
    sampled, with_loss = mask("x.x."), mask("x...")
    losses = gspo_surrogate(new, old, advantages, sampled, eps_low=0.9, eps_high=9)
    equal(losses[sampled].detach(), -math.exp(0.3) * f64([1, 2])[0])
    part = aggregate(losses, with_loss, reduction="sequence_mean")
    assert part.item() == pytest.approx(-math.exp(0.3), abs=1e-12)
    equal(gradient(part, new), f64([-math.exp(0.3), 0, 0, 0]))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("which", [0, 1])
def test_gspo_shows_a_broken_logprob_unless_its_response_is_masked_out(
    which: int, bad: float
) -> None:
    logs = [f64([-1, -1], [-1, -1]), f64([-1, -1], [-1, -1])]
    logs[which][0, 1] = bad
    leaf, m = logs[0].requires_grad_(), mask("xx", "xx")
    losses = gspo_surrogate(logs[0], logs[1], f64([2, 2], [3, 3]), m, **PAPER)
    assert losses[0].isnan().all()
    assert aggregate(losses, m, reduction="sequence_mean").isnan()
    filtered = aggregate(losses, mask("..", "xx"), reduction="sequence_mean")
    equal(gradient(filtered, leaf), f64([0, 0], [-1.5, -1.5]))


def test_gspo_shows_a_broken_advantage_of_its_token_alone() -> None:
    new = f64([-1, -1]).requires_grad_()
    losses = gspo_surrogate(new, f64([-1, -1]), f64([2, NAN]), mask("xx"), **PAPER)
    assert losses.isnan().tolist() == [[False, True]]
    equal(gradient(losses[mask("x.")], new), f64([-2, 0]))


def test_gspo_survives_an_exploding_ratio() -> None:
    new = torch.tensor([[300.0, 200.0], [-300.0, -200.0]], requires_grad=True)
    advantages = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    loss = gspo(new, torch.zeros(2, 2), advantages, mask("xx", "xx"), **PAPER)
    assert loss.isfinite()
    assert gradient(loss, new).isfinite().all()


def test_cispo_by_hand() -> None:
    """Ratios 8, 2, 1/8 and log pi = -1, -2, -3: weights 5, 2, 1/8, whatever the sign of A."""
    new = f64([-1, -2, -3]).requires_grad_()
    old = new.detach() - f64([8, 2, 0.125]).log()
    advantages = f64([1, -1, -2])
    losses = cispo_surrogate(new, old, advantages, eps_low=None, eps_high=4)
    equal(losses.detach(), f64([5, -4, -0.75]))
    loss = aggregate(losses, mask("xxx"), reduction="token_mean")
    assert loss.item() == pytest.approx(0.25 / 3, abs=1e-12)
    equal(gradient(loss, new), f64([-5 / 3, 2 / 3, 0.25 / 3]))
    losses = cispo_surrogate(new, old, advantages, eps_low=0.5, eps_high=0.5)
    equal(gradient(losses, new), f64([-1.5, 1.5, 1.0]))


@bounded
@given(seeds, st.sampled_from([None, 0.2, 0.9]), st.floats(0.01, 4.0))
def test_the_gradient_of_cispo_is_the_clipped_ratio_times_the_advantage(
    seed: int, eps_low: float | None, eps_high: float
) -> None:
    new, old, advantages, m = made_up(seed, noise=1.0)
    losses = cispo_surrogate(new, old, advantages, eps_low=eps_low, eps_high=eps_high)
    expected = torch.zeros(4, 7, dtype=torch.float64)
    total = 0.0
    for row in range(4):
        for t in (t for t in range(7) if m[row, t]):
            log_pi = float(new[row, t].detach())
            weight = min(math.exp(log_pi - float(old[row, t])), 1 + eps_high)
            weight = weight if eps_low is None else max(weight, 1 - eps_low)
            expected[row, t] = -weight * float(advantages[row, t]) / int(m.sum())
            total += float(expected[row, t]) * log_pi
    ours = aggregate(losses, m, reduction="token_mean")
    assert ours.item() == pytest.approx(total, abs=1e-12)
    equal(gradient(ours, new), expected)


def test_where_the_policies_are_equal_both_are_the_policy_gradient() -> None:
    new, _, advantages, m = made_up(0, noise=0.0)
    for losses in (
        gspo_surrogate(new, new.detach(), advantages, m, **PAPER),
        cispo_surrogate(new, new.detach(), advantages, eps_low=None, eps_high=4),
    ):
        found = gradient(aggregate(losses, m, reduction="token_mean"), new)
        equal(found, torch.where(m, -advantages / m.sum(), 0.0))


def gspo_everywhere(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    every = torch.ones_like(new, dtype=torch.bool)
    return gspo_surrogate(new, old, advantages, every, eps_low=0.9, eps_high=9)


SURROGATES = [
    pytest.param(gspo_everywhere, id="gspo"),
    pytest.param(lambda *x: cispo_surrogate(*x, eps_low=0.5, eps_high=4), id="cispo"),
]


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_of_bfloat16_they_are_float32_and_leave_the_other_inputs_alone(surrogate: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    leaves = [(-torch.rand(2, 5, generator=draw)).bfloat16().requires_grad_() for _ in range(3)]
    losses = surrogate(*leaves)
    assert losses.dtype == torch.float32
    equal(losses.detach(), surrogate(*(x.detach().float() for x in leaves)).detach(), atol=0)
    losses.sum().backward()
    assert leaves[0].grad is not None
    assert leaves[0].grad.any()
    assert leaves[1].grad is None
    assert leaves[2].grad is None


@pytest.mark.parametrize("which", [0, 1, 2])
def test_cispo_shows_a_non_finite_token_unless_masked_out(which: int) -> None:
    inputs = [f64([-1, -1]), f64([-1, -1]), f64([2, 2])]
    inputs[which][0, 1] = NAN
    leaf = inputs[0].requires_grad_()
    losses = cispo_surrogate(*inputs, eps_low=None, eps_high=4)
    assert losses.isnan().tolist() == [[False, True]]
    equal(gradient(aggregate(losses, mask("x."), reduction="token_mean"), leaf), f64([-2, 0]))


@pytest.mark.parametrize("bounds", [{"eps_low": 0.0}, {"eps_high": -1.0}, {"eps_high": NAN}])
def test_gspo_refuses_an_empty_band(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        gspo(f64([0]), f64([0]), f64([0]), mask("x"), **{**PAPER, **bounds})


@pytest.mark.parametrize("bounds", [{"eps_low": -0.1}, {"eps_high": -1.0}, {"eps_high": NAN}])
def test_cispo_refuses_negative_bounds(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be >= 0"):
        cispo_surrogate(f64([0]), f64([0]), f64([0]), **{"eps_low": 0.5, "eps_high": 4, **bounds})
