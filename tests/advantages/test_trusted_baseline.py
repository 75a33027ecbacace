"""`algorithm.baseline.kind: trusted` in the advantage stage: its two ends and its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.advantages.two_ranks import batch_of
from tests.systems import system_config
from vapo.advantages.estimators import estimate_advantages
from vapo.advantages.poise import baseline_of
from vapo.advantages.trusted_baseline import TrustedBaseline
from vapo.config import FitConfig
from vapo.functional.trusted_baseline import Trust
from vapo.types import EvaluatedBatch, Phase, TrainingBatch

TRUSTED = "algorithm.baseline.kind=trusted"
PAIRS = "components.group_sampling.group_size=2"
CORRECT = [True, False, True, True, False, False, True, False]
VALUES = [[0.7, 0.9, 0.8], [0.5, -0.6], [0.9, 0.3], [0.9], [-0.5], [-0.6, -0.9], [0.6, 0.8], [0.1]]


class Believing(TrustedBaseline):
    """A baseline whose trust is given."""

    given = Trust()

    @property
    def trust(self) -> Trust:
        return self.given


def config_of(*overrides: str) -> FitConfig:
    return system_config("vapo", PAIRS, *overrides)


def column(batch: TrainingBatch, name: str) -> torch.Tensor:
    tensor = getattr(batch, name)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def assert_close(batch: TrainingBatch, name: str, expected: list[list[float]]) -> None:
    torch.testing.assert_close(column(batch, name), torch.tensor(expected))


def trusted_of(config: FitConfig) -> TrustedBaseline:
    baseline = baseline_of(config.algorithm)
    assert isinstance(baseline, TrustedBaseline)
    return baseline


def trained_on(
    config: FitConfig, *, trust: Trust | None = None, batch: EvaluatedBatch | None = None
) -> TrainingBatch:
    baseline = baseline_of(config.algorithm)
    if trust is not None:
        assert isinstance(baseline, TrustedBaseline)
        baseline = Believing(baseline.config)
        baseline.given = trust
    batch = batch or batch_of(config, CORRECT, VALUES)
    return estimate_advantages(batch, Phase.POLICY_OPTIMIZATION, config, baseline)


@pytest.mark.parametrize("whitened", ["true", "false"])
def test_full_trust_is_vapo_bit_for_bit(whitened: str) -> None:
    options = (f"algorithm.whiten_advantages={whitened}",)
    plain = trained_on(config_of(*options))
    full = trained_on(config_of(*options, TRUSTED), trust=Trust(1.0, 1.0, end=1.0))
    for name in ("advantages", "raw_advantages", "value_targets", "policy_lambdas"):
        assert torch.equal(column(full, name), column(plain, name)), name
    assert torch.equal(column(full, "baseline_values"), full.values * full.response_mask)


@pytest.mark.parametrize("whitened", ["true", "false"])
def test_no_trust_is_the_loss_without_a_critic_bit_for_bit(whitened: str) -> None:
    options = (f"algorithm.whiten_advantages={whitened}",)
    without = config_of(
        *options,
        "algorithm.advantage_estimator=leave_one_out",
        "components.length_adaptive_gae.enabled=false",
        "components.value_pretraining.enabled=false",
        "components.decoupled_gae.enabled=false",
    )
    alone = trained_on(without)
    none = trained_on(config_of(*options, TRUSTED))  # nothing was seen before
    assert torch.equal(column(none, "advantages"), column(alone, "advantages"))
    assert torch.equal(column(none, "raw_advantages"), column(alone, "raw_advantages"))
    assert column(none, "policy_lambdas").tolist() == [1.0] * 8
    plain = trained_on(config_of(*options))
    assert torch.equal(column(none, "value_targets"), column(plain, "value_targets")), (
        "the critic learns as before"
    )


def test_in_between_by_hand() -> None:
    """Rewards 1 and -1, so B -1 and 1; a 0.5, w 0.5, lambda 0.5, so lambda' 0.75.

    The right one: V .6, .8, so U_1 = -1 + .8 = -.2, U_2 = -.2 + .1 = -.1; delta .1, 1.1, so
    A = .1 + .75 * 1.1 = .925, 1.1. The wrong one: V .2, U = 1 - .4 = .6, A = -1.6.
    """
    options = ("algorithm.whiten_advantages=false", "algorithm.lambda_policy=0.5")
    config = config_of(*options, "components.length_adaptive_gae.enabled=false", TRUSTED)
    batch = batch_of(config, [True, False], [[0.6, 0.8], [0.2]])
    made = trained_on(config, trust=Trust(0.5, 0.5, end=1.0), batch=batch)
    torch.testing.assert_close(
        column(made, "raw_advantages"), torch.tensor([[0.925, 1.1], [-1.6, 0.0]])
    )
    torch.testing.assert_close(
        column(made, "baseline_values"), torch.tensor([[-0.2, -0.1], [0.6, 0.0]])
    )
    assert column(made, "policy_lambdas").tolist() == [0.75, 0.75]


def test_the_final_surprise_reaches_every_token_as_far_as_it_is_unknown_by_hand() -> None:
    """As above, with an end of 0.25: of the surprises 1.1 and -1.6 three quarters reach all tokens.

    The first token has .1 + .75 * 1.1 / 4 + 1.1 * 3 / 4 = 1.13125; the last ones as before.
    """
    options = ("algorithm.whiten_advantages=false", "algorithm.lambda_policy=0.5")
    config = config_of(*options, "components.length_adaptive_gae.enabled=false", TRUSTED)
    batch = batch_of(config, [True, False], [[0.6, 0.8], [0.2]])
    made = trained_on(config, trust=Trust(0.5, 0.5, end=0.25), batch=batch)
    torch.testing.assert_close(
        column(made, "raw_advantages"), torch.tensor([[1.13125, 1.1], [-1.6, 0.0]])
    )


@pytest.mark.parametrize("lambda_", [0.0, 0.5])
def test_a_mixture_that_never_changes_is_the_loss_without_a_critic(lambda_: float) -> None:
    """Whatever lambda is: all of the reward is a surprise at the end."""
    options = ("algorithm.whiten_advantages=false", f"algorithm.lambda_policy={lambda_}")
    config = config_of(*options, "components.length_adaptive_gae.enabled=false", TRUSTED)
    batch = batch_of(config, [True, False], [[0.3, 0.3, 0.3], [0.3, 0.3]])
    made = trained_on(config, trust=Trust(0.0, 1.0), batch=batch)
    expected = torch.tensor([[2.0, 2.0, 2.0], [-2.0, -2.0, 0.0]])
    torch.testing.assert_close(column(made, "raw_advantages"), expected)


def test_one_response_per_prompt_stands_beside_the_batchs_others() -> None:
    config = config_of(TRUSTED, "algorithm.whiten_advantages=false")
    batch = replace(batch_of(config, CORRECT, VALUES), group_size=1)
    made = trained_on(config, batch=batch)  # 4 right, 4 wrong: others' means -1/7, 1/7
    torch.testing.assert_close(column(made, "raw_advantages")[:2, 0], torch.tensor([8 / 7, -8 / 7]))


def test_trust_is_of_earlier_batches_and_resumes_bit_for_bit() -> None:
    config = config_of(TRUSTED)
    whole, resumed = (trusted_of(config) for _ in range(2))
    batch = batch_of(config, CORRECT, VALUES)

    def advance(baseline: TrustedBaseline) -> TrainingBatch:
        return estimate_advantages(batch, Phase.POLICY_OPTIMIZATION, config, baseline)

    advance(whole)
    assert whole.metrics["baseline/within_weight"] == 0.0, "no batch was seen before the first"
    resumed.load_state_dict(whole.state_dict())
    first, second = advance(whole), advance(resumed)
    assert whole.metrics["baseline/within_weight"] > 0
    assert whole.metrics == resumed.metrics
    assert torch.equal(column(first, "advantages"), column(second, "advantages"))


def test_value_pretraining_is_evidence() -> None:
    config = config_of(TRUSTED)
    baseline = trusted_of(config)
    batch = batch_of(config, CORRECT, VALUES)
    estimate_advantages(batch, Phase.VALUE_PRETRAINING, config, baseline)
    assert baseline.trust.within > 0


def test_a_batch_that_is_not_finite_is_no_evidence() -> None:
    config = config_of(TRUSTED)
    baseline = trusted_of(config)
    batch = batch_of(config, CORRECT, VALUES)
    estimate_advantages(batch, Phase.POLICY_OPTIMIZATION, config, baseline)
    before = baseline.trust
    broken = replace(batch, old_values=torch.full_like(batch.values, float("nan")))
    estimate_advantages(broken, Phase.POLICY_OPTIMIZATION, config, baseline)
    assert baseline.trust == before


def test_overlong_punishment_is_in_the_others_and_not_in_the_critics_rewards() -> None:
    """With full trust VAPO's advantages, also where the critic is taught other rewards."""
    options = (
        "critic.reward=unshaped",
        "rewards.overlong.soft_punishment=true",
        "rewards.overlong.cache_tokens=4",
        "rollouts.max_response_tokens=8",
    )
    plain = trained_on(config_of(*options))
    full = trained_on(config_of(*options, TRUSTED), trust=Trust(1.0, 1.0, end=1.0))
    assert torch.equal(column(full, "advantages"), column(plain, "advantages"))
