"""`algorithm.baseline`, by hand: what the policy's advantages are, and what tether remembers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.advantages.two_ranks import KINDS, batch_of, computed, computed_on_a_rank
from tests.forked import on_ranks
from tests.systems import system_config
from vapo.advantages.critic_baseline import CriticBaseline
from vapo.advantages.estimators import estimate_advantages
from vapo.config import FitConfig
from vapo.types import EvaluatedBatch, Phase, TrainingBatch

# One group: a right and a wrong response of two tokens each, rewards 1 and 0, Monte-Carlo.
PLAIN = (
    "algorithm.whiten_advantages=false",
    "components.length_adaptive_gae.enabled=false",
    "algorithm.lambda_policy=1",
    "rewards.incorrect=0",
    "components.group_sampling.group_size=2",
)
VALUES = ((0.7, 1.0), (0.2, 0.1))
CRITIC = [[0.3, 0.0], [-0.2, -0.1]]


def config_of(*overrides: str) -> FitConfig:
    return system_config("vapo", *PLAIN, *overrides)


def estimate(
    config: FitConfig, baseline: CriticBaseline, batch: EvaluatedBatch | None = None
) -> TrainingBatch:
    batch = batch or batch_of(config, [True, False], VALUES)
    return estimate_advantages(batch, Phase.POLICY_OPTIMIZATION, config, baseline)


def raw(config: FitConfig, baseline: CriticBaseline) -> torch.Tensor:
    made = estimate(config, baseline)
    assert made.raw_advantages is not None
    assert made.value_targets is not None
    assert made.value_targets.tolist() == [[1.0, 1.0], [0.0, 0.0]], "the critic learns as before"
    return made.raw_advantages


def assert_close(found: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected))


def test_the_critics_own_advantages_stay_as_they_are() -> None:
    config = config_of()
    baseline = CriticBaseline(config.algorithm.baseline)
    plain = estimate_advantages(
        batch_of(config, [True, False], VALUES), Phase.POLICY_OPTIMIZATION, config
    )
    made = estimate(config, baseline)
    assert plain.advantages is not None
    assert made.advantages is not None
    assert torch.equal(made.advantages, plain.advantages)
    assert_close(made.advantages, CRITIC)
    assert baseline.metrics == {}


def test_linear_mix_by_hand() -> None:
    """A quarter of the critic's and three of +-1 (leave one out), or of +-1/2 (the mean)."""
    mixed = ("algorithm.baseline.kind=linear_mix", "algorithm.baseline.weight=0.25")
    config = config_of(*mixed)
    baseline = CriticBaseline(config.algorithm.baseline)
    assert_close(raw(config, baseline), [[0.825, 0.75], [-0.8, -0.775]])
    assert baseline.metrics == {"baseline/critic_weight": 0.25}
    config = config_of(*mixed, "algorithm.baseline.group_baseline=mean")
    baseline = CriticBaseline(config.algorithm.baseline)
    assert_close(raw(config, baseline), [[0.45, 0.375], [-0.425, -0.4]])
    alone = config_of(mixed[0], "algorithm.baseline.weight=1")
    assert_close(raw(alone, CriticBaseline(alone.algorithm.baseline)), CRITIC)


TETHER = ("algorithm.baseline.kind=tether", "algorithm.baseline.ridge=0")


def test_tether_uses_only_what_earlier_rollouts_have_fitted() -> None:
    """F = V - B: .7, 1, -.8, -.9; y = R - B = 1, 1, -1, -1: rho = 3.4 / 2.94."""
    config = config_of(*TETHER)
    baseline = CriticBaseline(config.algorithm.baseline)
    fitted = 3.4 / 2.94
    assert_close(raw(config, baseline), [[1.0, 1.0], [-1.0, -1.0]])  # rho 0: leave one out
    assert baseline.metrics == pytest.approx(
        {
            "baseline/critic_weight": 0.0,
            "baseline/fitted_weight": fitted,
            "baseline/num_fits": 1.0,
        }
    )
    rho = 0.1 * fitted
    assert baseline.rho == pytest.approx(rho)
    features, own = [[0.7, 1.0], [-0.8, -0.9]], torch.tensor(CRITIC)
    second = own + (1 - rho) * torch.tensor(features)
    torch.testing.assert_close(raw(config, baseline), second)
    assert baseline.rho == pytest.approx(0.9 * rho + 0.1 * fitted)


def test_tethers_state_goes_on_in_a_resumed_run() -> None:
    config = config_of(*TETHER)
    whole, resumed = (CriticBaseline(config.algorithm.baseline) for _ in range(2))
    raw(config, whole)
    resumed.load_state_dict(whole.state_dict())
    assert torch.equal(raw(config, whole), raw(config, resumed))
    assert whole.metrics == resumed.metrics
    assert whole.state_dict() == resumed.state_dict()


def test_a_window_without_a_fit_leaves_the_weight() -> None:
    """Values that are the baseline, rewards that are not finite, and value pretraining."""
    config = config_of(*TETHER)
    baseline = CriticBaseline(config.algorithm.baseline)
    raw(config, baseline)
    before = baseline.rho
    batch = batch_of(config, [True, False], ((0.0, 0.0), (1.0, 1.0)))
    estimate(config, baseline, batch)
    estimate(config, baseline, replace(batch, rewards=torch.tensor([torch.nan, 0.0])))
    assert (baseline.rho, baseline.num_fits) == (before, 1)
    estimate_advantages(
        batch_of(config, [True, False], VALUES), Phase.VALUE_PRETRAINING, config, baseline
    )
    assert (baseline.rho, baseline.num_batches) == (before, 3)


def test_tether_fits_on_the_tokens_that_the_policy_is_trained_on() -> None:
    """Without the second response: F .7 and 1, y 1 and 1."""
    config = config_of(*TETHER)
    baseline = CriticBaseline(config.algorithm.baseline)
    batch = batch_of(config, [True, False], VALUES)
    kept = batch.loss_mask & torch.tensor([[True], [False]])
    estimate(config, baseline, replace(batch, loss_mask=kept))
    assert baseline.metrics["baseline/fitted_weight"] == pytest.approx(1.7 / 1.49)


EVPO = "algorithm.baseline.kind=evpo"


def test_evpo_takes_the_critic_while_it_explains_enough() -> None:
    """Returns 1, 1, 0, 0 and errors .3, 0, -.2, -.1: 1 - .035 / .25 = .86 explained."""
    for threshold, expected in ((0.0, CRITIC), (0.9, [[0.5, 0.5], [-0.5, -0.5]])):
        config = config_of(EVPO, f"algorithm.baseline.threshold={threshold}")
        baseline = CriticBaseline(config.algorithm.baseline)
        assert_close(raw(config, baseline), expected)
        uses = float(threshold == 0)
        assert baseline.metrics == pytest.approx(
            {
                "baseline/critic_weight": uses,
                "baseline/explained_variance": 0.86,
                "baseline/critic_share": uses,
            }
        )


def test_evpo_over_responses_takes_the_mean_of_their_values() -> None:
    """Returns 1, 0 and mean errors .15, -.15: 1 - .0225 / .25 = .91 explained."""
    config = config_of(EVPO, "algorithm.baseline.level=response")
    baseline = CriticBaseline(config.algorithm.baseline)
    raw(config, baseline)
    assert baseline.metrics["baseline/explained_variance"] == pytest.approx(0.91)


def test_evpo_counts_how_often() -> None:
    config = config_of(EVPO)
    baseline = CriticBaseline(config.algorithm.baseline)
    raw(config, baseline)
    alike = batch_of(config, [True, True], VALUES)
    made = estimate(config, baseline, alike)
    assert made.raw_advantages is not None
    assert_close(made.raw_advantages, [[0.0, 0.0], [0.0, 0.0]])
    assert baseline.metrics["baseline/explained_variance"] == 0.0, "equal rewards: 0 by definition"
    assert baseline.metrics["baseline/critic_share"] == 0.5


def test_evpos_group_mean_is_of_the_group() -> None:
    rows = ([True, False, True, True], (*VALUES, *VALUES))
    means = {"batch_mean": [0.25, -0.75, 0.25, 0.25], "group_mean": [0.5, -0.5, 0.0, 0.0]}
    for fallback, expected in means.items():
        overrides = ("algorithm.baseline.threshold=1", f"algorithm.baseline.fallback={fallback}")
        config = config_of(EVPO, *overrides)
        made = estimate(config, CriticBaseline(config.algorithm.baseline), batch_of(config, *rows))
        assert made.raw_advantages is not None
        assert_close(made.raw_advantages, [[x, x] for x in expected])


@pytest.mark.slow
def test_two_processes_are_one() -> None:
    """Advantages, weights of the value loss, metrics and state, over two iterations."""
    found, second = on_ranks(2, computed_on_a_rank)
    for kind in KINDS:
        states = found[kind]["state"], second[kind]["state"]
        assert states[0] == states[1], "what is saved is the same on all ranks"
    one = computed(0, 1)
    assert set(found) == set(one) == set(KINDS)
    for kind, expected in one.items():
        assert found[kind].keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[kind][name], value, rtol=1e-5, atol=1e-6)
