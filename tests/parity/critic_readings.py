"""The policy losses of the presets of 2026, read from their formulas; see the test beside it.

Each takes a `Paper`, the made-up rollouts as lists of numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.parity.test_systems_against_formulas import Paper

ZERO = torch.zeros((), dtype=torch.float64)


def lambdas(p: Paper, alpha: float) -> list[float]:
    return [min(max(1 - 1 / (alpha * n), 0.0), 1.0) for n in p.lengths]


def whitened(rows: list[list[float]]) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    mean = sum(flat) / len(flat)
    variance = sum((x - mean) ** 2 for x in flat) / len(flat)
    return [[(x - mean) / (variance + 1e-8) ** 0.5 for x in row] for row in rows]


def everyone(p: Paper) -> list[int]:
    return list(range(p.num))


def others(p: Paper, i: int) -> float:
    """The reward less the mean of the other responses to the prompt."""
    group = p.group(i)
    return p.rewards[i] - (sum(group) - p.rewards[i]) / (len(group) - 1)


def sao(p: Paper) -> Tensor:
    a = whitened([p.gae(i, lambda_) for i, lambda_ in enumerate(lambdas(p, 1.5))])

    def loss(i: int, t: int) -> Tensor:
        r = math.exp(p.new[i][t].item() - p.sampled[i][t])
        return -(r if 0.7 < r < 6.0 else 0.0) * a[i][t] * p.new[i][t]

    return p.token_level(everyone(p), loss)


def bpco(p: Paper) -> Tensor:
    total = ZERO
    for i, lambda_ in enumerate(lambdas(p, 0.4)):
        for t, a in enumerate(p.gae(i, lambda_)):
            pi, mu = p.new[i][t].exp(), math.exp(p.sampled[i][t])
            moved = pi.item() - mu if a > 0 else mu - pi.item()
            if moved <= 0.2:
                total = total - a * pi / mu
    return total / p.num


def bpco_answer(p: Paper) -> Tensor:
    return bpco(p)


def le_critique(p: Paper) -> Tensor:
    rows = [[0.5 * a + 0.5 * others(p, i) for a in p.gae(i, 1.0)] for i in range(p.num)]
    a = whitened(rows)
    return p.token_level(everyone(p), lambda i, t: p.ppo(i, t, a[i][t]))


def tether(p: Paper) -> Tensor:
    """Its first batch: rho is 0, and the baseline that of the other responses alone."""
    a = whitened([[others(p, i)] * n for i, n in enumerate(p.lengths)])
    return p.token_level(everyone(p), lambda i, t: p.ppo(i, t, a[i][t]))


def evpo_advantages(p: Paper) -> list[list[float]]:
    """Unwhitened: GAE's where the values explain something of the returns of the tokens."""
    returns = [p.rewards[i] for i, n in enumerate(p.lengths) for _ in range(n)]
    errors = [p.rewards[i] - v for i in range(p.num) for v in p.values[i]]
    spread, left = (torch.tensor(x, dtype=torch.float64).var() for x in (returns, errors))
    if 1 - left / spread > 0:
        return [p.gae(i, lambda_) for i, lambda_ in enumerate(lambdas(p, 2.0))]
    mean = sum(p.rewards) / p.num
    return [[p.rewards[i] - mean] * n for i, n in enumerate(p.lengths)]


def with_vapos_losses(p: Paper, advantages: list[list[float]]) -> Tensor:
    policy = p.token_level(everyone(p), lambda i, t: p.ppo(i, t, advantages[i][t], high=0.28))
    correct = [i for i in everyone(p) if p.correct[i]]
    return policy + 0.1 * p.token_level(correct, lambda i, t: -p.new[i][t])


def evpo(p: Paper) -> Tensor:
    return with_vapos_losses(p, whitened(evpo_advantages(p)))


def trusted(p: Paper) -> Tensor:
    """Its first batch: nothing is trusted yet, and the baseline is the other responses' mean."""
    rows = [[others(p, i)] * n for i, n in enumerate(p.lengths)]
    return with_vapos_losses(p, whitened(rows))


def residual(p: Paper) -> Tensor:
    """Its values have the others' mean added already."""
    rows = [p.gae(i, lambda_) for i, lambda_ in enumerate(lambdas(p, 2.0))]
    return with_vapos_losses(p, whitened(rows))


def easyppo(p: Paper) -> Tensor:
    a = whitened([p.gae(i, 1.0) for i in everyone(p)])

    def loss(i: int, t: int) -> Tensor:
        clipped = p.ppo(i, t, a[i][t], high=0.28)
        if a[i][t] < 0:
            clipped = clipped.clamp(max=-3.0 * a[i][t])
        to_ref = p.ref[i][t] - p.new[i][t]
        return clipped + 0.25 * (to_ref.exp() - to_ref - 1)

    return p.token_level([i for i in everyone(p) if p.finished[i]], loss)


def justrl2(p: Paper) -> Tensor:
    a = whitened([p.gae(i, 0.5 ** (1 / n)) for i, n in enumerate(p.lengths)])
    return p.token_level(everyone(p), lambda i, t: p.ppo(i, t, a[i][t], high=0.28))


def sp3o(p: Paper) -> Tensor:
    a = whitened([p.gae(i, 1.0) for i in everyone(p)])
    return p.sample_level(lambda i, t: p.ppo(i, t, a[i][t]))


CRITIC_READINGS = {reading.__name__: reading for reading in (
    sao, bpco, bpco_answer, le_critique, tether, evpo, trusted, residual, easyppo, justrl2, sp3o
)}  # fmt: skip
