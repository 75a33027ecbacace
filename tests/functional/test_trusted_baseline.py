"""How far a critic is trusted, by hand and against a second computation, and its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear
from torch import Tensor

from vapo.functional.critic_mixtures import mean_of_batch_others
from vapo.functional.regression import two_weights_from_0_to_1
from vapo.functional.trusted_baseline import (
    Evidence,
    Trust,
    batch_evidence,
    earned_trust,
    final_surprise,
    later_evidence,
    no_evidence,
    trusted_lambda,
    trusted_values,
)

NAN = math.nan


def test_values_by_hand() -> None:
    """B 0.4, V_1 0.5, V_2 0.9, a 0.5, w 0.25: 0.4 + 0.5 * 0.1 = 0.45, then + 0.25 * 0.4 = 0.55."""
    values, mask = torch.tensor([[NAN, 0.5, 0.9]]), torch.tensor([[False, True, True]])
    others, none = torch.tensor([0.4]), torch.tensor([[NAN, 0.0, 0.0]])
    mixed = trusted_values(values, others, none, mask, trust=Trust(0.5, 0.25))
    torch.testing.assert_close(mixed, torch.tensor([[0.0, 0.45, 0.55]]))
    # levels of 0.1 and 0.2: less 0.5 * 0.1, and less 0.25 * 0.2
    lower = trusted_values(values, others, none, mask, trust=Trust(0.5, 0.25, 0.1, 0.2))
    torch.testing.assert_close(lower, torch.tensor([[0.0, 0.35, 0.45]]))
    # 0.3 received before the second token: w * 0.3 that the critic knows of, less all of it
    received = torch.tensor([[0.0, 0.0, 0.3]])
    later = trusted_values(values, others, received, mask, trust=Trust(0.5, 0.25))
    torch.testing.assert_close(later, torch.tensor([[0.0, 0.45, 0.55 - 0.75 * 0.3]]))


def test_full_trust_gives_the_values_bit_for_bit_and_none_the_others() -> None:
    draw = torch.Generator().manual_seed(0)
    values, received = (torch.randn(5, 7, generator=draw) for _ in range(2))
    others = torch.randn(5, generator=draw)
    mask = torch.ones(5, 7, dtype=torch.bool)
    columns = (values, others, received, mask)
    assert torch.equal(trusted_values(*columns, trust=Trust(1.0, 1.0)), values)
    assert torch.equal(trusted_values(*columns, trust=Trust()), others[:, None] - received)


def test_lambda_by_hand() -> None:
    lambdas = torch.tensor([[0.5], [0.9]], dtype=torch.double)
    assert trusted_lambda(lambdas, trust=Trust(0.3, 1.0)) is lambdas, "bit for bit"
    raised = trusted_lambda(lambdas, trust=Trust(1.0, 0.0))
    assert torch.as_tensor(raised).flatten().tolist() == [1.0, 1.0]
    assert trusted_lambda(0.6, trust=Trust(0.0, 0.25)) == pytest.approx(0.9)


def test_the_mean_of_the_batchs_others_leaves_out_fillers() -> None:
    rewards, counted = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([True, True, False])
    assert mean_of_batch_others(rewards, counted=counted).tolist() == [0.0, 1.0, 0.5]
    assert mean_of_batch_others(torch.tensor([1.0])).tolist() == [0.0]


def rollouts(kind: str, *, group_size: int = 8, seed: int = 0) -> dict[str, Tensor]:
    """Responses of 30 steps, each of which may end the hope of a reward, with values that know it.

    Prompts differ in how likely a slip is.
    """
    draw = torch.Generator().manual_seed(seed)
    num, steps = 128, 30
    chance = torch.rand(num // group_size, 1, generator=draw).expand(-1, group_size).reshape(-1)
    hopes, alive = [], torch.ones(num)
    for step in range(steps):
        hopes.append(alive * chance ** ((steps - step) / steps))
        alive = alive * (torch.rand(num, generator=draw) < chance ** (1 / steps))
    values, rewards = 2 * torch.stack(hopes, dim=1) - 1, 2 * alive - 1
    noise = torch.randn(num, steps, generator=draw)
    values = {
        "sound": values,
        "turned round": -values,
        "another response's": values[torch.randperm(num, generator=draw)],
        "noise alone": 0.5 * noise,
        "little noise": 0.01 * noise,
        "a constant": torch.full_like(values, 0.2),
        "a constant, then turned round": torch.cat([0 * values[:, :1], -values[:, 1:]], dim=1),
        "0.5 too high": values + 0.5,
        "blind to prompts": values - values[:, :1],
        "twice too sure": 2 * values,
    }[kind]
    others = mean_of_batch_others(rewards)
    if group_size > 1:
        sums = rewards.view(-1, group_size).sum(dim=1).repeat_interleave(group_size)
        others = (sums - rewards) / (group_size - 1)
    return {
        "values": values,
        "rewards": rewards,
        "others": others,
        "received": torch.zeros_like(values),
        "mask": torch.ones_like(values, dtype=torch.bool),
    }


def evidence(
    columns: dict[str, Tensor],
    *,
    group_size: int,
    trust: Trust | None = None,
) -> Evidence:
    values, rewards, others, received, mask = (
        columns[name] for name in ("values", "rewards", "others", "received", "mask")
    )
    mixed = trusted_values(values, others, received, mask, trust=trust or Trust())
    return batch_evidence(
        *(values, rewards, others, received, mask),
        trusted=mixed,
        group_size=group_size,
    )


def trust_after(kind: str, *, group_size: int = 8, batches: int = 4) -> Trust:
    seen = no_evidence()
    for seed in range(batches):
        columns = rollouts(kind, group_size=group_size, seed=seed)
        batch = evidence(columns, group_size=group_size, trust=earned_trust(seen))
        seen = later_evidence(seen, batch, decay=0.5)
    return earned_trust(seen)


@pytest.mark.parametrize("group_size", [1, 2, 8])
def test_a_sound_critic_is_trusted(group_size: int) -> None:
    trust = trust_after("sound", group_size=group_size)
    assert min(trust.first, trust.within) > 0.8
    assert abs(trust.first_level) < 0.1
    assert abs(trust.within_level) < 0.1


@pytest.mark.parametrize("group_size", [1, 2, 8])
@pytest.mark.parametrize("kind", ["turned round", "another response's", "noise alone"])
def test_a_destroyed_critic_is_not_trusted(kind: str, group_size: int) -> None:
    trust = trust_after(kind, group_size=group_size)
    assert trust.within <= 0.1
    assert trust.first <= 0.15


@pytest.mark.parametrize("group_size", [1, 8])
def test_values_that_say_nothing_have_no_weight(group_size: int) -> None:
    """V - B of a constant says what B says: with one response per prompt, the response's reward."""
    assert trust_after("a constant", group_size=group_size)[:2] == (0.0, 0.0)
    assert trust_after("little noise", group_size=group_size)[0] <= 0.15
    kind = "a constant, then turned round"
    assert trust_after(kind, group_size=group_size)[:2] == (0.0, 0.0)


@pytest.mark.parametrize("seed", range(12))
def test_first_values_that_are_nearly_equal_get_no_weight_above_1(seed: int) -> None:
    """V - B is then nearly -B, a feature of the fit: its inverse has few digits, its variance none.

    An untrained head has such values.
    """
    columns = rollouts("blind to prompts", group_size=2, seed=seed)
    noise = torch.randn(128, 1, generator=torch.Generator().manual_seed(seed))
    columns["values"] = columns["values"] + 5e-5 * noise
    trust = earned_trust(evidence(columns, group_size=2))
    assert 0 <= trust.first <= 0.15
    assert 0.8 < trust.within <= 1


@pytest.mark.parametrize("group_size", [1, 2, 8])
def test_a_critic_is_trusted_within_responses_and_not_between_prompts(group_size: int) -> None:
    trust = trust_after("blind to prompts", group_size=group_size)
    assert trust.first == 0.0
    assert trust.within > 0.9


def test_a_critic_that_is_twice_too_sure_gets_half_of_the_weight() -> None:
    sure = trust_after("twice too sure")
    assert 0.3 < sure.first < 0.6
    assert 0.4 < sure.within < 0.6


def test_a_level_is_found_that_explained_variance_does_not_see() -> None:
    trust, sound = trust_after("0.5 too high"), trust_after("sound")
    assert trust.first == pytest.approx(sound.first, abs=1e-3)
    assert trust.within == pytest.approx(sound.within, abs=1e-3)
    assert trust.first_level + trust.within_level == pytest.approx(0.5, abs=0.1)


def second_computation(columns: dict[str, Tensor], group_size: int) -> tuple[list[float], list]:
    """The same fit with token rows, numpy and scipy: weights with bounds, and standard errors."""
    v, r, b = (columns[name].double().numpy() for name in ("values", "rewards", "others"))
    mask = columns["mask"].numpy()
    rows = np.argwhere(mask)
    x = np.array([[v[i][mask[i]][0] - b[i], v[i, t] - v[i][mask[i]][0], b[i]] for i, t in rows])
    y = np.array([r[i] - b[i] for i, _ in rows])
    x, y = x - x.mean(axis=0), y - y.mean()
    bounds = ([0, 0, -np.inf], [1, 1, np.inf])
    bounded = lsq_linear(x, y, bounds=bounds, method="bvls").x
    free = np.linalg.lstsq(x, y, rcond=None)[0]
    inverse, meat = np.linalg.inv(x.T @ x), np.zeros((3, 3))
    prompts = rows[:, 0] // group_size
    for prompt in np.unique(prompts):
        score = x[prompts == prompt].T @ (y - x @ free)[prompts == prompt]
        meat += np.outer(score, score)
    num = len(np.unique(prompts))
    errors = np.sqrt(np.diag(inverse @ meat @ inverse) * num / (num - 2))
    largest = np.maximum(np.abs(free), bounded)
    shrunk = bounded * np.maximum(0, 1 - (errors / largest) ** 2)
    return shrunk[:2].tolist(), rows.tolist()


@pytest.mark.parametrize("kind", ["sound", "twice too sure", "0.5 too high", "turned round"])
def test_the_fit_is_that_of_a_second_computation(kind: str) -> None:
    """With ragged responses and a gap."""
    columns = rollouts(kind, group_size=4)
    lengths = torch.randint(3, 31, (128, 1), generator=torch.Generator().manual_seed(1))
    columns["mask"] = torch.arange(30) < lengths
    columns["mask"][:, 1] = False
    columns["values"] = torch.where(columns["mask"], columns["values"], NAN)
    trust = earned_trust(evidence(columns, group_size=4))
    weights, _ = second_computation(columns, 4)
    assert list(trust[:2]) == pytest.approx(weights, abs=1e-6)


def test_levels_by_hand() -> None:
    """Four prompts of one token or two; V - R: .4, .6, .8 (twice), 1: over tokens 3.6 / 5."""
    mask = torch.tensor([[True, False], [True, False], [True, True], [True, False]])
    errors = torch.tensor([[0.4, NAN], [0.6, NAN], [0.8, 0.8], [1.0, NAN]])
    rewards = torch.tensor([1.0, -1.0, 1.0, -1.0])
    columns = {
        "values": errors + rewards[:, None],
        "rewards": rewards,
        "others": mean_of_batch_others(rewards),
        "received": torch.zeros(4, 2),
        "mask": mask,
    }
    trust = earned_trust(evidence(columns, group_size=1))
    # mean .72: squares of the sums of V - R - .72 over prompts .1024, .0144, .0256, .0784
    variance = (0.1024 + 0.0144 + 0.0256 + 0.0784) / 5**2 * 4 / 2
    level = 0.72 * (1 - variance / 0.72**2)
    assert trust.first_level + trust.within_level == pytest.approx(level)
    variance = (0.09 + 0.01 + 0.01 + 0.09) / 4**2 * 4 / 2
    assert trust.first_level == pytest.approx(0.7 * (1 - variance / 0.7**2))


def test_the_final_surprise_by_hand() -> None:
    """Rewards of .3 on the way and .7 at the end; .6 is expected after the .3, so .1 is new."""
    values = torch.tensor([[0.2, 0.6, NAN], [NAN, NAN, NAN]])
    received = torch.tensor([[0.0, 0.3, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    found = final_surprise(values, torch.tensor([1.0, 5.0]), received, mask)
    torch.testing.assert_close(found, torch.tensor([0.1, 0.0]))


def test_what_is_known_at_the_end_by_hand() -> None:
    """Four prompts, U .5 first; R - U: .5, -.5 (squares 1), at the end .1, -.3 (squares .2)."""
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    mixed = torch.tensor([[0.5, 0.9], [0.5, 0.3], [0.5, 0.9], [0.5, 0.3]])
    seen = batch_evidence(
        torch.zeros(4, 2),
        rewards,
        torch.full((4,), 0.5),
        torch.zeros(4, 2),
        torch.ones(4, 2, dtype=torch.bool),
        trusted=mixed,
        group_size=1,
    )
    # 1 - .2 / 1; the sums of squares less .2 of the first: -.04, .04 (twice), over 1, times 4 / 2
    variance = 4 * 0.04**2 * 2
    assert earned_trust(seen).end == pytest.approx(0.8 * (1 - variance / 0.8**2))


def test_known_at_the_end() -> None:
    """A sound critic knows all but the last step's slip there, and a destroyed one nothing."""
    assert trust_after("sound").end > 0.85
    assert trust_after("0.5 too high").end > 0.8
    assert trust_after("turned round").end == 0.0
    assert trust_after("a constant").end == 0.0


def test_too_few_prompts_earn_nothing() -> None:
    columns = {name: column[:16] for name, column in rollouts("sound").items()}
    assert earned_trust(evidence(columns, group_size=8)) == Trust()
    assert earned_trust(evidence(columns, group_size=4)) != Trust()


def test_evidence_fades_and_its_products_by_the_square() -> None:
    one = Evidence(torch.ones(16).double(), torch.ones(16, 16).double())
    later = later_evidence(one, one, decay=0.5)
    assert later.sums.tolist() == [1.5] * 16
    assert later.products[3].tolist() == [1.25] * 16


@pytest.mark.parametrize("seed", range(20))
def test_two_weights_are_the_best_in_the_square(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(9, n, generator=draw, dtype=torch.double) for n in (3, 1))
    y = 3 * y[:, 0]
    bounds = ([0, 0, -np.inf], [1, 1, np.inf])
    best = lsq_linear(x.numpy(), y.numpy(), bounds=bounds, method="bvls").x
    found = two_weights_from_0_to_1(x.T @ x, x.T @ y)
    assert found == pytest.approx(best[:2].tolist(), abs=1e-8)
