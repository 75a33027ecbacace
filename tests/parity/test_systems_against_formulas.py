"""Each preset's loss and gradient against an independent reading of its paper's formula.

The readings are sums over responses and tokens in plain Python, with autograd on the current
log-probs; they share nothing with the shipped code but the made-up rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.parity.critic_readings import CRITIC_READINGS
from tests.systems import (
    CRITIC_FREE,
    MAX_RESPONSE_TOKENS,
    SYSTEMS,
    estimated,
    made_up_batch,
    mostly_slow,
    system_config,
)
from tests.systems import system_loss as shipped_loss
from vapo.types import EvaluatedBatch, FinishReason

G, BETA, ALPHA, MU = 3, 0.25, 2.0, 0.1
ZERO = torch.zeros((), dtype=torch.float64)


class Paper:
    """The rollouts as lists of numbers, and the current policy's log-probs."""

    def __init__(self, batch: EvaluatedBatch, logprobs: Tensor) -> None:
        self.lengths = [len(rollout.response_ids) for rollout in batch.rollouts]
        self.num = len(self.lengths)
        self.rewards = batch.rewards.tolist()
        self.correct = batch.is_correct.tolist()
        assert batch.baseline_rewards is not None
        self.greedy = batch.baseline_rewards.tolist()
        self.finished = [r.finish_reason is FinishReason.STOP for r in batch.rollouts]
        self.new = [logprobs[i, :n] for i, n in enumerate(self.lengths)]
        self.old = self.rows(batch.old_logprobs)
        self.sampled = self.rows(batch.rollout_logprobs)
        self.ref = self.rows(batch.ref_logprobs)
        self.values = self.rows(batch.old_values)
        assert batch.step_starts is not None
        self.starts = [
            [t for t in range(n) if batch.step_starts[i, t]] for i, n in enumerate(self.lengths)
        ]
        self.step_values = self.rows(batch.step_values)
        self.collisions = self.rows_or_none(batch.old_collisions)
        self.told = self.rows_or_none(batch.answer_logprobs)

    def rows(self, x: Tensor | None) -> list[list[float]]:
        assert x is not None
        return [x[i, :n].tolist() for i, n in enumerate(self.lengths)]

    def rows_or_none(self, x: Tensor | None) -> list[list[float]]:
        return [] if x is None else self.rows(x)

    def group(self, i: int) -> list[float]:
        return self.rewards[i // G * G : i // G * G + G]

    def ppo(self, i: int, t: int, advantage: float, high: float = 0.2) -> Tensor:
        """Minus PPO's objective of one token."""
        ratio = (self.new[i][t] - self.old[i][t]).exp()
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1 + high) * advantage)

    def log_ratio(self, i: int, t: int) -> float:
        return self.old[i][t] - self.ref[i][t]

    def sample_level(self, loss: Callable[[int, int], Tensor]) -> Tensor:
        total = ZERO
        for i, length in enumerate(self.lengths):
            total = total + sum((loss(i, t) for t in range(length)), ZERO) / length
        return total / self.num

    def token_level(self, rows: list[int], loss: Callable[[int, int], Tensor]) -> Tensor:
        terms = [loss(i, t) for i in rows for t in range(self.lengths[i])]
        return sum(terms, ZERO) / len(terms)

    def gae(self, i: int, lambda_: float, values: list[list[float]] | None = None) -> list[float]:
        """A_t as the expanded sum of (gamma lambda)^k times TD errors."""
        v = [*(values or self.values)[i], 0.0]
        last = self.lengths[i] - 1
        deltas = [
            (self.rewards[i] if t == last else 0.0) + v[t + 1] - v[t] for t in range(last + 1)
        ]
        return [
            sum(lambda_ ** (k - t) * deltas[k] for k in range(t, last + 1)) for t in range(last + 1)
        ]


def whitened(rows: list[list[float]]) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    mean = sum(flat) / len(flat)
    variance = sum((x - mean) ** 2 for x in flat) / len(flat)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


def mean(x: list[float]) -> float:
    return sum(x) / len(x)


def std(x: list[float]) -> float:
    return math.sqrt(sum((y - mean(x)) ** 2 for y in x) / (len(x) - 1))


def vapo(p: Paper, values: list[list[float]] | None = None) -> Tensor:
    lambdas = [min(max(1 - 1 / (ALPHA * n), 0.0), 1.0) for n in p.lengths]
    return vapo_loss(p, [p.gae(i, lambdas[i], values) for i in range(p.num)])


def vapo_loss(p: Paper, advantages: list[list[float]]) -> Tensor:
    a = whitened(advantages)
    rows = list(range(p.num))
    policy = p.token_level(rows, lambda i, t: p.ppo(i, t, a[i][t], high=0.28))
    correct = [i for i in rows if p.correct[i]]
    return policy + MU * p.token_level(correct, lambda i, t: -p.new[i][t])


def ppo(p: Paper) -> Tensor:
    a = whitened([p.gae(i, 0.95) for i in range(p.num)])
    return p.sample_level(lambda i, t: p.ppo(i, t, a[i][t]))


def vc_ppo(p: Paper) -> Tensor:
    a = [p.gae(i, 0.95) for i in range(p.num)]
    return p.sample_level(lambda i, t: p.ppo(i, t, a[i][t]))


def grpo(p: Paper) -> Tensor:
    def loss(i: int, t: int) -> Tensor:
        group = p.group(i)
        advantage = (p.rewards[i] - mean(group)) / (std(group) + 1e-6)
        to_ref = p.ref[i][t] - p.new[i][t]
        return p.ppo(i, t, advantage) + BETA * (to_ref.exp() - to_ref - 1)

    return p.sample_level(loss)


def dr_grpo(p: Paper) -> Tensor:
    total = ZERO
    for i, length in enumerate(p.lengths):
        advantage = p.rewards[i] - mean(p.group(i))
        total = total + sum((p.ppo(i, t, advantage) for t in range(length)), ZERO)
    return total / MAX_RESPONSE_TOKENS / p.num


def dapo(p: Paper) -> Tensor:
    l_cache = MAX_RESPONSE_TOKENS // 5
    verdicts = [1.0 if correct else -1.0 for correct in p.correct]
    punished = [
        reward - min(max(length - (MAX_RESPONSE_TOKENS - l_cache), 0) / l_cache, 1)
        for reward, length in zip(verdicts, p.lengths, strict=True)
    ]
    assert p.rewards == pytest.approx(punished)

    def loss(i: int, t: int) -> Tensor:
        group = punished[i // G * G : i // G * G + G]
        return p.ppo(i, t, (punished[i] - mean(group)) / (std(group) + 1e-6), high=0.28)

    return p.token_level([i for i in range(p.num) if p.finished[i]], loss)


def rloo(p: Paper) -> Tensor:
    kl = [sum(p.log_ratio(i, t) for t in range(n)) for i, n in enumerate(p.lengths)]
    r = [reward - BETA * penalty for reward, penalty in zip(p.rewards, kl, strict=True)]
    total = ZERO
    for i in range(p.num):
        others = [r[j] for j in range(i // G * G, i // G * G + G) if j != i]
        total = total - (r[i] - mean(others)) * p.new[i].sum()
    return total / p.num


def reinforce_pp(p: Paper) -> Tensor:
    to_go = [
        [p.rewards[i] - BETA * sum(p.log_ratio(i, k) for k in range(t, n)) for t in range(n)]
        for i, n in enumerate(p.lengths)
    ]
    a = whitened(to_go)
    return p.sample_level(lambda i, t: p.ppo(i, t, a[i][t]))


def reinforce_pp_baseline(p: Paper) -> Tensor:
    (a,) = whitened([[p.rewards[i] - mean(p.group(i)) for i in range(p.num)]])

    def loss(i: int, t: int) -> Tensor:
        return p.ppo(i, t, a[i]) + BETA * (p.new[i][t] - p.ref[i][t]) ** 2 / 2

    return p.sample_level(loss)


def remax(p: Paper) -> Tensor:
    total = ZERO
    for i, length in enumerate(p.lengths):
        kl = sum(p.log_ratio(i, t) for t in range(length))
        total = total - (p.rewards[i] - BETA * kl - p.greedy[i]) * p.new[i].sum()
    return total / p.num


def raft(p: Paper) -> Tensor:
    kept = [i for i in range(p.num) if p.correct[i]]
    return p.token_level(kept, lambda i, t: -p.new[i][t])


def vineppo(p: Paper) -> Tensor:
    a = []
    for i, length in enumerate(p.lengths):
        row = []
        for t in range(length):
            start = max(s for s in p.starts[i] if s <= t)
            after = [s for s in p.starts[i] if s > t]
            later = p.step_values[i][after[0]] if after else p.rewards[i]
            row.append(later - p.step_values[i][start])
        a.append(row)
    a = whitened(a)

    def loss(i: int, t: int) -> Tensor:
        to_ref = p.ref[i][t] - p.new[i][t]
        return p.ppo(i, t, a[i][t]) + BETA * (to_ref.exp() - to_ref - 1)

    return p.token_level(list(range(p.num)), loss)


def poise(p: Paper) -> Tensor:
    """The first iterations, whose baseline is the other responses' mean; test_poise has the rest.

    Dual clip 10: the loss of a negative advantage is 10 |A| at most.
    """

    def loss(i: int, t: int) -> Tensor:
        others = [p.rewards[j] for j in range(i // G * G, i // G * G + G) if j != i]
        a = p.rewards[i] - mean(others)
        clipped = p.ppo(i, t, a, high=0.28)
        return clipped.clamp(max=-10 * a) if a < 0 else clipped

    return p.token_level(list(range(p.num)), loss)


def milestones(p: Paper) -> Tensor:
    """VAPO's, with the values of milestones; test_milestones has these."""
    return vapo(p, p.step_values)


def otb(p: Paper) -> Tensor:
    """VAPO's loss, with the rewards against means weighted by squared gradients so far."""

    def weight(i: int, t: int) -> float:
        pairs = zip(p.old[i][: t + 1], p.collisions[i], strict=False)
        return sum(max(1 - 2 * math.exp(logprob) + same, 0) for logprob, same in pairs)

    def baseline(i: int, t: int) -> float:
        first = i // G * G
        there = [j for j in range(first, first + G) if p.lengths[j] > t]
        if there == [i]:
            return mean([p.rewards[j] for j in range(first, first + G) if j != i])
        weights = [weight(j, t) for j in there]
        weighted = sum(w * p.rewards[j] for w, j in zip(weights, there, strict=True))
        return weighted / sum(weights)

    return vapo_loss(
        p, [[p.rewards[i] - baseline(i, t) for t in range(n)] for i, n in enumerate(p.lengths)]
    )


def oppo(p: Paper) -> Tensor:
    """VAPO's loss, with the rewards against chances whose odds the answer's evidence multiplies."""
    advantages = []
    for i, length in enumerate(p.lengths):
        first = i // G * G
        right = sum(p.correct[j] for j in range(first, first + G) if j != i)
        odds, row = (right + 0.5) / (G - 1 - right + 0.5), []
        for t in range(length):
            row.append(p.rewards[i] - (2 * odds / (1 + odds) - 1))
            odds *= math.exp(p.told[i][t]) / math.exp(p.old[i][t])
        advantages.append(row)
    return vapo_loss(p, advantages)


def gspo(p: Paper) -> Tensor:
    """The ratio of a response as one differentiable number; the shipped loss goes by tokens."""
    total = ZERO
    for i, length in enumerate(p.lengths):
        group = p.group(i)
        advantage = (p.rewards[i] - mean(group)) / (std(group) + 1e-6)
        logs = [p.new[i][t] - p.old[i][t] for t in range(length)]
        s = (sum(logs, ZERO) / length).exp()
        total = total - torch.min(s * advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * advantage)
    return total / p.num


def cispo(p: Paper) -> Tensor:
    def loss(i: int, t: int) -> Tensor:
        group = p.group(i)
        advantage = (p.rewards[i] - mean(group)) / (std(group) + 1e-6)
        weight = min(math.exp(p.new[i][t].item() - p.old[i][t]), 5.0)
        return -weight * advantage * p.new[i][t]

    return p.token_level(list(range(p.num)), loss)


READINGS = {reading.__name__: reading for reading in (
    vapo, ppo, vc_ppo, grpo, dr_grpo, dapo, rloo, reinforce_pp, reinforce_pp_baseline, remax, raft,
    vineppo, poise, milestones, otb, oppo, gspo, cispo,
)} | {"hl_gauss": vapo, "probe": vapo, "adapters": vapo, **CRITIC_READINGS}  # fmt: skip


def overrides(system: str) -> list[str]:
    """The budget of the made-up rollouts; a KL coefficient that shows, where there is a KL."""
    has_kl = system_config(system).algorithm.kl.coef > 0
    budget = f"rollouts.max_response_tokens={MAX_RESPONSE_TOKENS}"
    return [budget, f"algorithm.kl.coef={BETA}"] if has_kl else [budget]


def test_every_preset_has_a_reading() -> None:
    assert set(READINGS) == set(SYSTEMS)


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.night) for s in (1, 2))])
@pytest.mark.parametrize("system", mostly_slow(SYSTEMS))
def test_loss_and_gradient(system: str, seed: int) -> None:
    config = system_config(system, *overrides(system))
    batch, logprobs = made_up_batch(config, seed=seed)
    ours = shipped_loss(config, estimated(config, batch), logprobs)
    theirs = READINGS[system](Paper(batch, logprobs))
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    (our_gradient,) = torch.autograd.grad(ours, logprobs)
    (their_gradient,) = torch.autograd.grad(theirs, logprobs)
    assert their_gradient.abs().max() > 1e-3
    torch.testing.assert_close(our_gradient, their_gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("system", mostly_slow(SYSTEMS))
def test_gradient_does_not_depend_on_the_cut(system: str) -> None:
    config = system_config(system, *overrides(system))
    made, logprobs = made_up_batch(config)
    batch = estimated(config, made)
    losses = [shipped_loss(config, batch, logprobs, max_tokens=n) for n in (10_000, 25)]
    gradients = [torch.autograd.grad(loss, logprobs)[0] for loss in losses]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("system", mostly_slow(CRITIC_FREE))
def test_equal_rewards_in_a_group_teach_nothing(system: str) -> None:
    """Every verdict wrong: zero where a group is the baseline, and nowhere a NaN."""
    config = system_config(system, "algorithm.kl.coef=0")
    made, logprobs = made_up_batch(config)
    wrong = torch.zeros_like(made.is_correct)
    rewards = torch.full_like(made.rewards, -1.0)
    batch = estimated(config, replace(made, is_correct=wrong, rewards=rewards))
    loss = shipped_loss(config, batch, logprobs)
    assert loss.isfinite()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.isfinite().all()
    if system not in ("remax", "vineppo", "milestones", "oppo"):  # values of states
        assert batch.advantages is not None
        assert not batch.advantages.any()
        assert not gradient.any()
