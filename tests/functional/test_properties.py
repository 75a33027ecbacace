"""What holds of the math whatever the numbers: padding, order, scale, masks, finiteness."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vapo.functional.advantages import (
    decoupled_gae,
    gae,
    length_adaptive_lambda,
    monte_carlo_returns,
    whiten,
)
from vapo.functional.baselines import (
    group_mean_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
    whitened_group_mean_advantages,
)
from vapo.functional.losses import (
    aggregate,
    clipped_surrogate,
    kl_penalty,
    positive_example_lm_loss,
    value_loss,
)
from vapo.functional.masking import (
    LossReduction,
    loss_denominator,
    place_at_last_token,
    zero_outside,
)
from vapo.functional.metrics import approx_kl, clip_fractions, explained_variance
from vapo.functional.mismatch import mismatch, responses_in_range, truncated_importance_weights
from vapo.functional.surrogates import logprob_surrogate

bounded = settings(max_examples=15, deadline=None, derandomize=True, database=None)
REDUCTIONS: tuple[LossReduction, ...] = ("token_mean", "sequence_mean", "sequence_sum")
GARBAGE = (math.nan, math.inf, -math.inf, 1e30)


@st.composite
def batches(draw: Any) -> dict[str, Tensor]:
    """Random float64 numbers of a batch; rows may have gaps, or no token at all."""
    num_rows, num_columns = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([1e-3, 1.0, 30.0]))
    density = draw(st.sampled_from([0.3, 0.8, 1.0]))
    shape = (num_rows, num_columns)

    def normal(factor: float = 1.0) -> Tensor:
        return factor * torch.randn(shape, generator=generator, dtype=torch.double)

    return {
        "mask": torch.rand(shape, generator=generator) < density,
        "rewards": normal(scale),
        "values": normal(scale),
        "advantages": normal(scale),
        "logprobs": -normal().abs(),
        "old_logprobs": -normal().abs(),
        "is_correct": torch.rand(num_rows, generator=generator) < 0.5,
    }


shares = st.floats(0.0, 1.0)


def with_garbage(batch: dict[str, Tensor], value: float) -> dict[str, Tensor]:
    """The same batch with three more columns of padding, and garbage wherever the mask is False."""
    padded = {}
    for name, x in batch.items():
        if x.dim() == 1:
            padded[name] = x
            continue
        fill = False if x.dtype is torch.bool else value
        wider = torch.nn.functional.pad(x, (0, 3), value=fill)
        if name != "mask":
            wider[:, : x.shape[1]][~batch["mask"]] = value
        padded[name] = wider
    return padded


def token_results(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Everything per token."""
    mask, rewards, values = batch["mask"], batch["rewards"], batch["values"]
    advantages, targets = decoupled_gae(
        rewards, values, mask, gamma=0.9, lambda_policy=0.7, lambda_critic=0.95
    )
    logs = (batch["logprobs"], batch["old_logprobs"], mask)
    return {
        "advantages": advantages,
        "targets": targets,
        "returns": monte_carlo_returns(rewards, mask, gamma=0.9),
        "white": whiten(batch["advantages"], mask),
        "token weights": zero_outside(truncated_importance_weights(*logs, cap=2.0), mask),
        "sequence weights": zero_outside(
            truncated_importance_weights(*logs, cap=2.0, level="sequence"), mask
        ),
    }


def scalar_results(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every loss and metric, over the batch."""
    mask, logs = batch["mask"], (batch["logprobs"], batch["old_logprobs"])
    surrogate = clipped_surrogate(*logs, batch["advantages"], eps_low=0.2, eps_high=0.28)
    results: dict[str, Tensor] = {
        name: aggregate(surrogate, mask, reduction=name) for name in REDUCTIONS
    }
    for estimator in ("k1", "k2", "k3"):
        kl = kl_penalty(*logs, estimator=estimator)
        results[estimator] = aggregate(kl, mask, reduction="token_mean")
    plain = logprob_surrogate(batch["logprobs"], batch["advantages"])
    results |= {
        "logprob": aggregate(plain, mask, reduction="token_mean"),
        "lm": positive_example_lm_loss(batch["logprobs"], mask, batch["is_correct"]),
        "value": value_loss(batch["values"], batch["rewards"], mask),
        "clipped value": value_loss(
            batch["values"],
            batch["rewards"],
            mask,
            old_values=batch["advantages"],
            value_clip=0.2,
        ),
    }
    low, high = clip_fractions(*logs, batch["advantages"], mask, eps_low=0.2, eps_high=0.28)
    return results | {"low": low, "high": high}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=1e-9, atol=1e-12, msg=name)


@bounded
@given(batches(), st.sampled_from(GARBAGE))
def test_padding_and_what_lies_in_it_change_nothing(batch: dict[str, Tensor], value: float) -> None:
    padded = with_garbage(batch, value)
    width = batch["mask"].shape[1]
    found = token_results(padded)
    assert_same(token_results(batch), {name: x[:, :width] for name, x in found.items()})
    assert all(not x[:, width:].any() for x in found.values())
    assert_same(scalar_results(batch), scalar_results(padded))


@bounded
@given(batches(), st.sampled_from(GARBAGE))
def test_gradients_are_finite_and_nothing_flows_into_padding(
    batch: dict[str, Tensor], value: float
) -> None:
    padded = with_garbage(batch, value)
    leaves = [padded[name].requires_grad_() for name in ("logprobs", "values")]
    total = torch.stack([x.double() for x in scalar_results(padded).values()]).sum()
    assert torch.isfinite(total)
    for gradient in torch.autograd.grad(total, leaves):
        assert torch.isfinite(gradient).all()
        assert not gradient[~padded["mask"]].any()


@bounded
@given(batches())
def test_finite_numbers_give_finite_numbers_even_for_rows_without_tokens(
    batch: dict[str, Tensor],
) -> None:
    batch["mask"][0] = False
    for name, x in (token_results(batch) | scalar_results(batch)).items():
        assert torch.isfinite(x).all(), name
    kept = responses_in_range(
        batch["old_logprobs"], batch["logprobs"], batch["mask"], low=0.9, high=1.1
    )
    assert bool(kept[0]), "a row without tokens is in range"


@bounded
@given(batches(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(batch: dict[str, Tensor], draw: Any) -> None:
    order = list(range(len(batch["mask"])))
    draw.shuffle(order)
    shuffled = {name: x[order] for name, x in batch.items()}
    before = token_results(batch)
    assert_same({name: x[order] for name, x in before.items()}, token_results(shuffled))
    assert_same(scalar_results(batch), scalar_results(shuffled))


@bounded
@given(batches(), st.floats(0.1, 10.0), shares, shares)
def test_gae_is_linear_in_rewards_and_values(
    batch: dict[str, Tensor], factor: float, gamma: float, lambda_: float
) -> None:
    mask = batch["mask"]
    options: dict[str, Any] = {"gamma": gamma, "lambda_": lambda_}
    one = gae(batch["rewards"], batch["values"], mask, **options)
    other = gae(batch["values"], batch["rewards"], mask, **options)
    mixed = gae(
        batch["rewards"] * factor + batch["values"],
        batch["values"] * factor + batch["rewards"],
        mask,
        **options,
    )
    torch.testing.assert_close(mixed, one * factor + other, rtol=1e-9, atol=1e-9)


@bounded
@given(batches(), shares, shares)
def test_decoupled_with_equal_lambdas_is_one_gae(
    batch: dict[str, Tensor], gamma: float, lambda_: float
) -> None:
    numbers = (batch["rewards"], batch["values"], batch["mask"])
    advantages, targets = decoupled_gae(
        *numbers, gamma=gamma, lambda_policy=lambda_, lambda_critic=lambda_
    )
    single = gae(*numbers, gamma=gamma, lambda_=lambda_)
    assert torch.equal(advantages, single)
    expected = zero_outside(single + batch["values"], batch["mask"])
    torch.testing.assert_close(targets, expected, rtol=1e-9, atol=1e-9)


@bounded
@given(batches(), shares)
def test_lambda_one_is_monte_carlo_and_lambda_zero_one_step(
    batch: dict[str, Tensor], gamma: float
) -> None:
    rewards, values, mask = batch["rewards"], batch["values"], batch["mask"]
    returns = monte_carlo_returns(rewards, mask, gamma=gamma)
    full = gae(rewards, values, mask, gamma=gamma, lambda_=1.0)
    expected = returns - zero_outside(values, mask)
    torch.testing.assert_close(full, expected, rtol=1e-9, atol=1e-9)
    perfect = gae(rewards, returns, mask, gamma=gamma, lambda_=0.3)
    torch.testing.assert_close(perfect, torch.zeros_like(perfect), rtol=0, atol=1e-9)


@bounded
@given(batches())
def test_without_discount_the_first_return_is_the_whole_reward(batch: dict[str, Tensor]) -> None:
    mask = batch["mask"]
    placed = place_at_last_token(batch["rewards"][:, 0], mask)
    returns = monte_carlo_returns(placed, mask, gamma=1.0)
    expected = torch.where(mask, batch["rewards"][:, :1], 0.0)
    torch.testing.assert_close(returns, expected, rtol=1e-12, atol=0)


@bounded
@given(batches(), st.floats(0.5, 4.0), st.floats(-9.0, 9.0))
def test_whitening_forgets_scale_and_shift(
    batch: dict[str, Tensor], factor: float, shift: float
) -> None:
    mask, x = batch["mask"], batch["advantages"] / batch["advantages"].abs().max()
    white = whiten(x, mask)
    num_tokens = int(mask.sum())
    if num_tokens == 0 or float(x[mask].std(correction=0)) < 0.05:
        return
    again = whiten(factor * x + shift, mask)
    torch.testing.assert_close(again, white, rtol=1e-4, atol=1e-4)
    assert abs(float(white[mask].mean())) < 1e-9
    assert abs(float(white[mask].std(correction=0)) - 1.0) < 1e-4
    constant = whiten(torch.full_like(x, shift), mask)
    assert constant.abs().max() < 1e-6


@bounded
@given(st.integers(2, 4), st.integers(1, 4), st.floats(0.1, 9.0), st.integers(0, 2**31))
def test_group_baselines(group_size: int, num_groups: int, factor: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rewards = torch.randn(num_groups * group_size, generator=draw, dtype=torch.double)
    options = {"group_size": group_size}
    shift = torch.randn(num_groups, generator=draw).double().repeat_interleave(group_size)
    for estimate in (group_mean_advantages, leave_one_out_advantages):
        one = estimate(rewards, **options)
        assert one.view(-1, group_size).sum(dim=1).abs().max() < 1e-9
        torch.testing.assert_close(estimate(factor * rewards + shift, **options), factor * one)
    for estimate in (group_relative_advantages, whitened_group_mean_advantages):
        scaled, one = estimate(factor * rewards + shift, **options), estimate(rewards, **options)
        torch.testing.assert_close(scaled, one, rtol=1e-3, atol=1e-3)
    equal = torch.full_like(rewards, factor)
    for estimate in (
        group_mean_advantages,
        leave_one_out_advantages,
        group_relative_advantages,
        whitened_group_mean_advantages,
    ):
        assert not estimate(equal, **options).any()


@bounded
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=6), st.floats(0.01, 3.0))
def test_the_adaptive_lambda_grows_with_the_length(lengths: list[int], alpha: float) -> None:
    ordered = torch.tensor(sorted(lengths))
    lambdas = length_adaptive_lambda(ordered, alpha=alpha).flatten()
    assert bool(((lambdas >= 0) & (lambdas < 1)).all())
    assert bool((lambdas.diff() >= 0).all())


@bounded
@given(batches(), st.integers(1, 4))
def test_a_loss_in_parts_adds_up(batch: dict[str, Tensor], num_parts: int) -> None:
    mask, x = batch["mask"], batch["advantages"]
    for reduction in REDUCTIONS:
        whole = aggregate(x, mask, reduction=reduction)
        denominator = loss_denominator(mask, reduction=reduction)
        parts = [
            aggregate(a, m, reduction=reduction, denominator=denominator)
            for a, m in zip(x.chunk(num_parts), mask.chunk(num_parts), strict=True)
        ]
        torch.testing.assert_close(torch.stack(parts).sum(), whole, rtol=1e-9, atol=1e-12)


@bounded
@given(batches(), st.floats(0.0, 0.9), st.floats(0.0, 0.9))
def test_the_clip_only_ever_makes_the_loss_larger(
    batch: dict[str, Tensor], eps_low: float, eps_high: float
) -> None:
    logs, advantages = (batch["logprobs"], batch["old_logprobs"]), batch["advantages"]
    clipped = clipped_surrogate(*logs, advantages, eps_low=eps_low, eps_high=eps_high)
    free = -(logs[0] - logs[1]).exp() * advantages
    assert bool((clipped >= free - 1e-9).all())
    on_policy = clipped_surrogate(logs[0], logs[0], advantages, eps_low=eps_low, eps_high=eps_high)
    torch.testing.assert_close(on_policy, -advantages)


@bounded
@given(batches(), st.floats(-9.0, 9.0))
def test_metrics_at_their_ends(batch: dict[str, Tensor], shift: float) -> None:
    mask, returns = batch["mask"], batch["rewards"]
    assert float(approx_kl(batch["logprobs"], batch["logprobs"], mask).nan_to_num()) == 0.0
    assert float(approx_kl(batch["logprobs"], batch["old_logprobs"], mask).nan_to_num()) >= 0.0
    if mask.sum() > 1 and float(returns[mask].std()) > 1e-3 * float(returns.abs().max()):
        perfect = explained_variance(returns + shift, returns, mask)
        assert abs(float(perfect) - 1.0) < 1e-6
        assert abs(float(explained_variance(torch.full_like(returns, shift), returns, mask))) < 1e-6
    if mask.any():
        same = mismatch(batch["logprobs"], batch["logprobs"], mask)
        assert float(same.max_abs) == float(same.k3) == float(same.outlier_share) == 0.0
        assert float(same.token_ratio.min) == float(same.sequence_ratio.max) == 1.0
        found = mismatch(batch["old_logprobs"], batch["logprobs"], mask)
        assert float(found.k3) >= 0.0
        assert float(found.mean_abs) <= float(found.max_abs) + 1e-12
        assert float(found.token_ratio.min) <= float(found.token_ratio.mean) + 1e-12
        assert float(found.token_ratio.mean) <= float(found.token_ratio.max) + 1e-12
