"""The optimal token baseline and OPPO's values by hand, and computed in a second way."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from vapo.functional.advantages import gae
from vapo.functional.logprobs import token_logprobs
from vapo.functional.token_baselines import optimal_token_advantages, success_values

NAN = float("nan")
PLAIN: dict[str, Any] = {"group_size": 3, "gamma": 1, "alone": "others_mean"}
OPTIONS: dict[str, Any] = {"smoothing": 0.5, "max_evidence": None, "low": -1, "high": 1}


def group() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards 1, -1, 1 of responses of 2, 3 and 1 tokens, the second with a gap between them.

    w is 1 - 2 pi + same: 0.5, 0.25 | 1, 0.5, 0.25 | 0. Beside the tokens there is nothing to read.
    """
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0]]).bool()
    rewards = torch.tensor([[0, 1, NAN, NAN], [0, NAN, 0, -1], [1, NAN, NAN, NAN]])
    pi = torch.tensor([[0.5, 0.75, 9, 9], [0.25, 9, 0.5, 0.75], [1, 9, 9, 9]])
    same = torch.tensor([[0.5, 0.75, NAN, NAN], [0.5, NAN, 0.5, 0.75], [1, NAN, NAN, NAN]])
    return rewards, torch.where(mask, pi.log(), NAN), same, mask


def test_optimal_baseline_by_hand() -> None:
    """W is 0.5, 0.75 | 1, 1.5, 1.75 | 0, so B_1 = (0.5 - 1 + 0) / 1.5 = -1/3 and
    B_2 = (0.75 - 1.5) / 2.25 = -1/3. The third token of the second row has no other: the mean of
    the others' rewards is 1 there."""
    found = optimal_token_advantages(*group(), **PLAIN)
    third = 4 / 3
    expected = torch.tensor([[third, third, 0, 0], [-2 / 3, 0, -2 / 3, -2], [third, 0, 0, 0]])
    torch.testing.assert_close(found, expected)
    of_code = optimal_token_advantages(*group(), **{**PLAIN, "alone": "zero"})
    expected[1, 3] = -1
    torch.testing.assert_close(of_code, expected)


def test_discounted_returns_are_compared_where_they_are() -> None:
    """With gamma 1/2 the returns are 0.5, 1 | -0.25, -0.5, -1 | 1: B_1 = 0 / 1.5, and
    B_2 = (0.75 - 0.75) / 2.25. Alone: the others' whole returns, 0.5 and 1."""
    found = optimal_token_advantages(*group(), **{**PLAIN, "gamma": 0.5})
    expected = torch.tensor([[0.5, 1, 0, 0], [-0.25, 0, -0.5, -1.75], [1, 0, 0, 0]])
    torch.testing.assert_close(found, expected)


def test_certain_tokens_count_alike() -> None:
    """They have no gradient, and 0 / 0 would be their baseline."""
    mask = torch.ones(4, 1, dtype=torch.bool)
    rewards = torch.tensor([[1.0], [0.0], [0.5], [0.5]])
    columns = torch.zeros(4, 1), torch.ones(4, 1), mask
    found = optimal_token_advantages(rewards, *columns, group_size=2, gamma=1, alone="zero")
    assert found.flatten().tolist() == [0.5, -0.5, 0, 0]


def test_weights_are_squared_gradients() -> None:
    """w is |d log pi / d logits|^2, by autograd, with the sum of squares of the log-prob pass."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 3, generator=draw), torch.randn(7, 3, generator=draw)
    targets = torch.tensor([0, 3, 6, 6, 2])
    same = torch.empty(5)
    logprobs, _ = token_logprobs(
        hidden, weight, targets, temperature=0.7, chunk_size=2, collisions=same
    )
    logits = (hidden @ weight.T / 0.7).requires_grad_()
    chosen = logits.log_softmax(dim=1).gather(1, targets[:, None])
    (gradient,) = torch.autograd.grad(chosen.sum(), logits)
    torch.testing.assert_close(1 - 2 * logprobs.exp() + same, gradient.square().sum(dim=1))
    alone, entropy = token_logprobs(hidden, weight, targets, temperature=0.7, chunk_size=2)
    both = token_logprobs(hidden, weight, targets, temperature=0.7, collisions=torch.empty(5))
    torch.testing.assert_close(both, (alone, entropy))


def test_it_is_the_baseline_of_least_variance() -> None:
    """Of all constants B at one token the weighted mean makes sum W (G - B)^2 least."""
    draw = torch.Generator().manual_seed(1)
    pi, rewards = torch.rand(6, 1, generator=draw).double(), torch.randn(6, 1, generator=draw)
    rewards = rewards.double()
    mask, same = torch.ones(6, 1, dtype=torch.bool), pi**2 + (1 - pi) ** 2
    columns = (rewards, pi.log(), same, mask)
    found = optimal_token_advantages(*columns, group_size=6, gamma=1, alone="zero")
    weights, baseline = 1 - 2 * pi + same, (rewards - found)[0]
    loss = [float((weights * (rewards - baseline - x) ** 2).sum()) for x in (-1e-3, 0, 1e-3)]
    assert loss[1] < min(loss[0], loss[2])
    assert float((baseline - rewards.mean()).abs()) > 0.01, "and no plain mean"


def test_order_and_other_groups_do_not_matter() -> None:
    columns = group()
    found = optimal_token_advantages(*columns, **PLAIN)
    order = [2, 0, 1]
    permuted = optimal_token_advantages(*(x[order] for x in columns), **PLAIN)
    torch.testing.assert_close(permuted, found[order])
    twice = (torch.cat([columns[0], 9 - columns[0]]), *(torch.cat([x, x]) for x in columns[1:]))
    assert torch.equal(optimal_token_advantages(*twice, **PLAIN)[:3], found)


def test_groups_are_two_or_more() -> None:
    with pytest.raises(ValueError, match="group"):
        optimal_token_advantages(*group(), **{**PLAIN, "group_size": 1})
    right, logprobs = torch.tensor([True]), torch.zeros(1, 1)
    mask = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="group"):
        success_values(right, logprobs, logprobs, mask, group_size=1, **OPTIONS)


# ---- OPPO -----------------------------------------------------------------------------------


def evidence() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three responses, of which the first and the last are right; ratios 2, 3 | 1/4, 1, 1 | 1."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0]]).bool()
    plain = torch.tensor([[0.25, 0.25, 1, 1], [0.5, 1, 0.5, 0.5], [0.5, 1, 1, 1]])
    ratio = torch.tensor([[2, 3, NAN, NAN], [0.25, NAN, 1, 1], [1, NAN, NAN, NAN]])
    right = torch.tensor([True, False, True])
    return right, (plain * ratio).log(), torch.where(mask, plain.log(), NAN), mask


def test_success_values_by_hand() -> None:
    """One of the first's two others is right: odds (1 + 1/2) / (1 + 1/2) = 1, then 2. Both of the
    second's are: odds 5, then 5/4 and 5/4."""
    values = success_values(*evidence(), group_size=3, **OPTIONS)
    expected = [[0, 1 / 3, 0, 0], [2 / 3, 0, 1 / 9, 1 / 9], [0, 0, 0, 0]]
    torch.testing.assert_close(values, torch.tensor(expected))
    of_range = success_values(*evidence(), group_size=3, **{**OPTIONS, "low": 0, "high": 10})
    assert of_range[0].tolist() == pytest.approx([5, 20 / 3, 0, 0])
    bounded = {**OPTIONS, "max_evidence": math.log(2)}
    second = success_values(*evidence(), group_size=3, **bounded)[1]
    assert second.tolist() == pytest.approx([2 / 3, 0, 3 / 7, 3 / 7]), "odds 5 / 2"


def test_smoothing_keeps_the_odds_finite_and_no_evidence_is_too_much() -> None:
    right = torch.tensor([True, True])
    plain = torch.full((2, 3), -1e4)
    told = torch.tensor([[0.0, -3e4, 0.0], [0.0, 0.0, -1e9]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    values = success_values(right, told, plain, mask, group_size=2, **OPTIONS)
    assert values.isfinite().all()
    assert values.tolist() == [[0.5, 1, -1], [0.5, 1, 1]]


def test_lambda_0_is_the_papers_advantage_and_adds_up() -> None:
    """A_t = V_{t+1} - V_t, the last R - V_T; together R - V_1."""
    values = success_values(*evidence(), group_size=3, **OPTIONS)
    mask, placed = evidence()[3], torch.zeros(3, 4)
    placed[0, 1], placed[1, 3], placed[2, 0] = 1.0, -1.0, 1.0
    found = gae(placed, values, mask, gamma=1, lambda_=0)
    expected = [[1 / 3, 2 / 3, 0, 0], [-5 / 9, 0, 0, -10 / 9], [1, 0, 0, 0]]
    torch.testing.assert_close(found, torch.tensor(expected))
    torch.testing.assert_close(found.sum(dim=1), torch.tensor([1.0, -5 / 3, 1.0]))


def test_no_value_has_the_response_s_own_verdict_or_its_future_in_it() -> None:
    right, told, plain, mask = evidence()
    values = success_values(right, told, plain, mask, group_size=3, **OPTIONS)
    for row, column in product(range(3), range(4)):
        other, later = right.clone(), told.clone()
        other[row], later[row, column:] = ~other[row], 5.0
        found = success_values(other, later, plain, mask, group_size=3, **OPTIONS)
        assert torch.equal(found[row, : column + 1], values[row, : column + 1])
    flipped = success_values(~right, told, plain, mask, group_size=3, **OPTIONS)
    assert not torch.equal(flipped, values)


def test_the_posterior_is_right_where_the_model_is() -> None:
    """A right response writes 1 with 3/4, a wrong one with 1/4: Bayes by counting all of them.

    The ratio to the *wrong* ones' probability is the exact factor; the paper's takes all for them.
    """
    right, wrong, prior = 0.75, 0.25, 0.5
    for tokens in product((0, 1), repeat=3):
        likelihood = [
            math.prod(p if token else 1 - p for token in tokens[:-1]) for p in (right, wrong)
        ]
        exact = prior * likelihood[0] / (prior * likelihood[0] + (1 - prior) * likelihood[1])
        chosen = torch.tensor(tokens).bool()
        told, plain = (
            torch.where(chosen, torch.tensor(p), torch.tensor(1 - p)).log().expand(2, 3)
            for p in (right, wrong)
        )
        mask = torch.ones(2, 3, dtype=torch.bool)
        options = {**OPTIONS, "smoothing": 1e6, "low": 0, "group_size": 2}  # the prior is a half
        values = success_values(torch.tensor([True, False]), told, plain, mask, **options)
        assert float(values[0, 2]) == pytest.approx(exact, abs=1e-5)
