"""Whatever is computed of an episode is computed of its sampled tokens, as if nothing was between.

The same episodes with observations and without them, where everything that stands on an
observation is 999 or nan: every column, metric, profile and loss must agree.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.judged import judged_batch
from tests.rollout_fixtures import make_episodes
from tests.systems import CRITIC_FREE, WITH_CRITIC, mostly_slow, system_config, system_loss
from tests.tracking.metric_docs import documented_keys
from vapo.advantages.agreement import mask_by_spread
from vapo.advantages.critic_baseline import CriticBaseline
from vapo.advantages.estimators import estimate_advantages
from vapo.advantages.mismatch_correction import correct_mismatch, correction_metrics
from vapo.config import FitConfig, resolve
from vapo.diagnostics.iteration_metrics import (
    episode_metrics,
    iteration_metrics,
    response_metrics,
)
from vapo.diagnostics.oracle import token_returns
from vapo.diagnostics.position_profiles import position_profile, value_calibration
from vapo.diagnostics.value_page.contents import token_columns
from vapo.environments.contract import Verdict
from vapo.functional.columns import bad_inputs
from vapo.rollouts.batch import make_rollout_batch
from vapo.types import (
    EvaluatedBatch,
    FinishReason,
    Phase,
    Prompt,
    Rollout,
    RolloutBatch,
    TrainingBatch,
    Turn,
)

NAN = float("nan")
NUM, GROUP, MOST = 12, 3, 16
NOT_HERE = ("remax", "vineppo", "poise", "milestones", "oppo")
OTHERS = [name for name in CRITIC_FREE if name not in NOT_HERE]
"""Those without a baseline that these batches lack."""
TURNS = (
    "environment.kind=function",
    "environment.function=my_games:Guess",
    "algorithm.gae_over=turns",
)


def without_observations(rollout: Rollout) -> Rollout:
    own = rollout.is_sampled
    return replace(
        rollout,
        response_ids=tuple(
            x for x, is_own in zip(rollout.response_ids, own, strict=True) if is_own
        ),
        rollout_logprobs=tuple(
            x for x, is_own in zip(rollout.rollout_logprobs, own, strict=True) if is_own
        ),
        turns=tuple(replace(turn, num_observed=0) for turn in rollout.turns),
    )


def evaluated(config: FitConfig, *, observations: bool) -> tuple[EvaluatedBatch, Tensor]:
    """The batch and current log-probs; the columns' numbers are those of the sampled tokens."""
    rollouts, verdicts = make_episodes(NUM, vocab_size=30)
    if not observations:
        rollouts = [without_observations(rollout) for rollout in rollouts]
    batch = judged_batch(
        rollouts,
        verdicts,
        group_size=GROUP,
        rewards=config.rewards,
        max_response_tokens=MOST,
        critic_truncated=config.critic.truncated,
    )
    generator = torch.Generator().manual_seed(0)

    def column(scale: float, mean: float, beside: float) -> Tensor:
        x = torch.full(batch.response_mask.shape, beside, dtype=torch.float64)
        numbers = torch.randn(int(batch.response_mask.sum()), generator=generator).double()
        x[batch.response_mask] = mean + scale * numbers
        return x

    made: dict[str, Any] = {
        "old_logprobs": column(0.5, -2.0, NAN),
        "ref_logprobs": column(0.5, -2.0, NAN),
        "old_values": column(0.5, 0.2, 999.0),
        "value_spread": column(0.1, 1.0, NAN),
        "old_entropy": column(0.1, 1.0, NAN),
    }
    batch = replace(batch, rollout_logprobs=column(0.5, -2.0, 999.0))
    logprobs = made["old_logprobs"] + column(0.3, 0.0, NAN)
    made["old_collisions"] = column(0.1, 0.5, NAN)
    return EvaluatedBatch(**vars(batch), **made), logprobs.requires_grad_()


def on_sampled(x: Tensor, batch: RolloutBatch) -> Tensor:
    return x[batch.response_mask] if x.dim() == 2 else x


def assert_close(a: Any, b: Any, what: str) -> None:
    if isinstance(a, Tensor) and not a.is_floating_point():
        assert torch.equal(a, b), what
    elif isinstance(a, Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, equal_nan=False, msg=what)
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), what
        for key in a:
            assert_close(a[key], b[key], f"{what} {key}")
    elif isinstance(a, list):
        assert len(a) == len(b), what
        for one, other in zip(a, b, strict=True):
            assert_close(one, other, what)
    else:
        assert a == pytest.approx(b, abs=1e-6), what


def everything(
    config: FitConfig, *, observations: bool
) -> tuple[TrainingBatch, dict[str, Any], tuple[Tensor, Tensor]]:
    """The training batch, what is shown and logged of it, and the policy's loss and gradient."""
    batch, logprobs = evaluated(config, observations=observations)
    assert not any(bool(rows.any()) for rows in bad_inputs(batch).values())
    baseline = CriticBaseline(config.algorithm.baseline)
    training = estimate_advantages(batch, Phase.POLICY_OPTIMIZATION, config, baseline)
    training = correct_mismatch(training, config.algorithm.mismatch)
    training, _ = mask_by_spread(training, agreement=0.2)
    training, _ = mask_by_spread(training, disagreement=0.2)
    numbers = resolve(config)
    shown = {
        "metrics": {
            key: number
            for key, number in iteration_metrics(training, numbers).items()
            if "observation" not in key
        },
        "baseline": baseline.metrics,
        "correction": correction_metrics(training, config.algorithm.mismatch),
        "profile": position_profile(training, numbers, max_response_tokens=MOST),
        "calibration": value_calibration(training, numbers),
        "page": {
            name: on_sampled(column, training)
            for name, column in token_columns(training, config).items()
        },
        "returns": token_returns(training, config),
    }
    loss = system_loss(config, training, logprobs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert float(gradient[~training.response_mask].abs().sum()) == 0
    return training, shown, (loss.detach(), on_sampled(gradient, training))


def assert_observations_do_not_matter(config: FitConfig) -> None:
    ours, shown, loss = everything(config, observations=True)
    plain, shown_plain, loss_plain = everything(config, observations=False)
    for item in fields(TrainingBatch):
        columns = getattr(ours, item.name), getattr(plain, item.name)
        assert isinstance(columns[0], Tensor) == isinstance(columns[1], Tensor), item.name
        if isinstance(columns[0], Tensor) and item.name not in ("response_ids", "response_mask"):
            pair = on_sampled(columns[0], ours), on_sampled(columns[1], plain)
            assert_close(*pair, item.name)
    assert bool((~ours.response_mask[:, 0]).any()), "some episodes begin with an observation"
    assert_close(shown, shown_plain, "shown")
    assert_close(list(loss), list(loss_plain), "loss")


@pytest.mark.parametrize("system", mostly_slow([*WITH_CRITIC, *OTHERS]))
def test_every_system(system: str) -> None:
    assert_observations_do_not_matter(system_config(system, "critic.prompt.kind=policy"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        TURNS,
        (*TURNS, "components.length_adaptive_gae.k=0.5", "algorithm.gamma=0.9"),
        ("critic.bootstrap_truncated=true",),
        (*TURNS, "critic.bootstrap_truncated=true"),
        ("algorithm.kl.coef=0.1", "algorithm.kl.placement=reward", "algorithm.kl.estimator=k1"),
        (*TURNS, "algorithm.kl.coef=0.1", "algorithm.kl.placement=reward"),
        (*TURNS, "critic.truncated=leave_out", "rewards.overlong.filter_truncated=false"),
        (
            "algorithm.mismatch.tis_cap=1.1",
            "algorithm.mismatch.tis_level=sequence",
            "algorithm.mismatch.mask_below=0.8",
        ),
        ("rewards.overlong.soft_punishment=true", "rewards.overlong.cache_tokens=12"),
        ("rewards.overlong.soft_punishment=true", "critic.reward=unshaped"),
        (
            "algorithm.baseline.kind=evpo",
            "algorithm.baseline.level=response",
            "algorithm.baseline.threshold=-1000",
        ),
        ("algorithm.baseline.kind=linear_mix", *TURNS),
    ],
    ids=lambda overrides: "+".join(overrides[-2:]),
)
def test_every_option(overrides: tuple[str, ...]) -> None:
    assert_observations_do_not_matter(system_config("vapo", *overrides))


def two_turns(*, finish: FinishReason = FinishReason.STOP) -> Rollout:
    """An observation, two sampled tokens worth 0.5, an observation, one worth 1."""
    turns = (Turn(1, 2, 0.5), Turn(2, 1, 1.0))
    prompt = Prompt("p", "", (2,), "1")
    return Rollout(prompt, (5,) * 6, "", (-1.0,) * 6, finish, turns, in_environment=True)


def two_turn_batch(config: FitConfig, rollout: Rollout) -> EvaluatedBatch:
    batch = judged_batch(
        [rollout], [Verdict(True, 1.5)], rewards=config.rewards, max_response_tokens=MOST
    )
    values = torch.tensor([[NAN, 0.25, NAN, NAN, NAN, 0.5]])  # turns read no others
    zeros = torch.zeros_like(values)
    return EvaluatedBatch(**vars(batch), old_logprobs=zeros, old_values=values)


PLAIN = (
    *TURNS,
    "algorithm.whiten_advantages=false",
    "algorithm.gamma=0.5",
    "components.length_adaptive_gae.alpha=1",
)


@pytest.mark.parametrize("phase", list(Phase))
def test_turns_through_the_stage_by_hand(phase: Phase) -> None:
    """lambda = 1 - 1 / (1 * 2 turns) = 1/2; A_2 = 0.5, A_1 = 0.5 + 0.25 - 0.25 + 0.125."""
    config = system_config("vapo", *PLAIN)
    found = estimate_advantages(two_turn_batch(config, two_turns()), phase, config)
    assert found.value_targets is not None
    assert found.value_targets.tolist() == [[0, 1.0, 0, 0, 0, 1.0]]
    assert found.value_mask.tolist() == [[False, True, False, False, False, True]]
    assert found.policy_mask.tolist() == [[False, True, True, False, False, True]]
    if phase is Phase.POLICY_OPTIMIZATION:
        assert found.advantages is not None
        assert found.advantages.tolist() == [[0, 0.625, 0.625, 0, 0, 0.5]]
        numbers = resolve(config)
        assert iteration_metrics(found, numbers)["advantage/lambda_policy_mean"] == 0.5
        assert iteration_metrics(found, numbers)["advantage/first_token_reward_weight"] == 0.25
        profile = position_profile(found, numbers, max_response_tokens=MOST)
        assert profile["value_mean"] == [0.25, 0.25, 0.5]
        assert profile["reward_weight_mean"] == [0.25, 0.25, 1.0]


def test_the_value_of_a_truncated_episodes_last_turn_stands_for_its_reward() -> None:
    """delta_2 = 0.5 * 0.5 - 0.5: the reward of 1 is in the value of 0.5 already."""
    config = system_config("vapo", *PLAIN, "critic.bootstrap_truncated=true")
    rollout = two_turns(finish=FinishReason.TURNS)
    found = estimate_advantages(two_turn_batch(config, rollout), Phase.POLICY_OPTIMIZATION, config)
    assert found.advantages is not None
    assert float(found.advantages[0, 5]) == -0.25


@pytest.mark.parametrize("over", ["tokens", "turns"])
def test_a_critic_that_learns_its_targets_of_a_truncated_episode_comes_to_rest(over: str) -> None:
    overrides = (f"algorithm.gae_over={over}", "algorithm.gamma=1")
    config = system_config("vapo", *PLAIN, "critic.bootstrap_truncated=true", *overrides)
    batch = two_turn_batch(config, two_turns(finish=FinishReason.TURNS))
    for _ in range(4):
        targets = estimate_advantages(batch, Phase.POLICY_OPTIMIZATION, config).value_targets
        assert targets is not None
        batch = replace(batch, old_values=targets)
    assert batch.values[0, [1, 5]].tolist() == [1.0, 0.5], (
        "the first turn's 0.5, then V of the last"
    )


def test_without_turns_the_whole_response_is_one() -> None:
    config = system_config("vapo", *PLAIN)
    rollout = replace(two_turns(), turns=(), in_environment=False)
    batch = two_turn_batch(config, rollout)
    assert batch.turn_starts.tolist() == [[True] + [False] * 5]
    values = torch.tensor([[0.25, NAN, NAN, NAN, NAN, NAN]])
    found = estimate_advantages(
        replace(batch, old_values=values), Phase.POLICY_OPTIMIZATION, config
    )
    assert found.advantages is not None
    assert found.advantages.tolist() == [[1.25] * 6]
    assert int(found.value_mask.sum()) == 1


def test_a_response_beside_episodes_keeps_its_reward() -> None:
    config = system_config("vapo", *TURNS)
    plain = Rollout(two_turns().prompt, (5,) * 3, "", (-1.0,) * 3, FinishReason.STOP)
    batch = judged_batch(
        [two_turns(), plain],
        [Verdict(True, 1.5), Verdict(False, -1.0)],
        rewards=config.rewards,
        max_response_tokens=MOST,
    )
    assert batch.rewards.tolist() == [1.5, -1.0]
    assert batch.response_lengths.tolist() == [3, 3]
    assert batch.turn_starts.sum(dim=1).tolist() == [2, 1]


def test_metrics_of_episodes_by_hand_and_none_without_turns() -> None:
    config = system_config("vapo")
    cut = replace(two_turns(finish=FinishReason.LENGTH), turns=(Turn(0, 6, 0.0),))
    out_of_turns = two_turns(finish=FinishReason.TURNS)
    half_a_turn = two_turns(finish=FinishReason.TURN_LENGTH)
    rollouts = [two_turns(), cut, out_of_turns, half_a_turn]
    verdicts = [Verdict(False, sum(turn.reward for turn in r.turns)) for r in rollouts]
    options: dict[str, Any] = {
        "group_size": 1,
        "rewards": config.rewards,
        "max_response_tokens": MOST,
    }
    found = response_metrics(judged_batch(rollouts, verdicts, **options))
    assert found["rollout/truncation_rate"] == 0.75
    assert found["rollout/num_response_tokens"] == 3 + 6 + 3 + 3
    found = episode_metrics(judged_batch(rollouts, verdicts, **options))
    assert found == {
        "rollout/turns_mean": 1.75,
        "rollout/turns_max": 2.0,
        "rollout/turn_reward_mean": 4.5 / 7,
        "rollout/observation_tokens_mean": 2.25,
        "rollout/num_observation_tokens": 9.0,
        "rollout/truncated_by_tokens_rate": 0.25,
        "rollout/truncated_by_turn_tokens_rate": 0.25,
        "rollout/truncated_by_turns_rate": 0.25,
    }
    assert found.keys() <= documented_keys()
    plain = replace(two_turns(), turns=(), in_environment=False)
    assert episode_metrics(judged_batch([plain], verdicts[:1], **options)) == {}


def test_an_environments_failure_is_not_a_verifiers() -> None:
    none = [Verdict(False, 1.5, failure="timeout"), Verdict(False, 0.0, failure="crash")]
    plain = replace(two_turns(), turns=(), in_environment=False)
    lost = replace(two_turns(), turns=(Turn(0, 6, 0.0),))
    rewards = system_config("vapo").rewards
    batch = judged_batch([plain, lost], none, rewards=rewards, max_response_tokens=MOST)
    assert batch.is_lost.tolist() == [False, True]
    assert response_metrics(batch)["rollout/verifier_failures"] == 1.0


def test_metrics_where_every_episode_failed_before_its_first_turn() -> None:
    config = system_config("vapo")
    prompts = [Prompt(name, "", (2,), "") for name in "ab"]
    lost = [
        Rollout(p, (), "", (), FinishReason.LENGTH, failure="timeout", in_environment=True)
        for p in prompts
    ]
    lost = [replace(rollout, is_lost=True, is_correct=False) for rollout in lost]
    batch = make_rollout_batch(lost, group_size=1, rewards=config.rewards, max_response_tokens=8)
    zeros = torch.zeros(batch.response_mask.shape)
    evaluated = EvaluatedBatch(**vars(batch), old_logprobs=zeros, old_values=zeros)
    found = estimate_advantages(evaluated, Phase.POLICY_OPTIMIZATION, config)
    assert math.isnan(iteration_metrics(found, resolve(config))["critic/value_mean"])
