"""`resolve()`, the only reader of the components' `enabled`: switches become numbers.

A component that is off takes its degenerate value, the one that plain PPO uses, so the code
below the config sees numbers and never switches. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from vapo.config.algorithm import MismatchConfig
from vapo.config.estimators import (
    OppoOptions,
    OtbOptions,
    OwnEstimatorOptions,
    PoiseOptions,
)
from vapo.config.rewards import SeveralVerifiers
from vapo.config.schema import FitConfig

if TYPE_CHECKING:  # it imports torch
    from vapo.functional.masking import LossReduction

_SEQUENCE_REDUCTIONS: dict[str, LossReduction] = {
    "mean": "sequence_mean",
    "sum": "sequence_sum",
    "constant_length": "constant_length",
}


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers that the seven components resolve to.

    `lambda_critic` None: the value targets share the policy's lambda. `alpha` None: the
    policy's lambda is the constant `lambda_policy`, unless `k` is given (one of the two at most).
    `gae_over`: whether a token or a whole turn is one step of gamma and the lambdas.
    `reads_old_logprobs`: whether training needs the policy's log-probs from before the update.
    `verifier_weights`: the weight of each verifier by name; empty if there is one verifier.
    """

    value_pretraining_iterations: int
    lambda_critic: float | None
    alpha: float | None
    k: float | None
    loss_reduction: LossReduction
    eps_high: float
    mu: float
    num_prompts: int
    group_size: int
    lambda_policy: float
    eps_low: float
    gamma: float
    gae_over: Literal["tokens", "turns"] = "tokens"
    reads_old_logprobs: bool = True
    verifier_weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_responses(self) -> int:
        """The number of responses in an iteration."""
        return self.num_prompts * self.group_size


def resolve(config: FitConfig) -> Hyperparameters:
    """Turn the seven switches into numbers: a component that is off gives plain PPO's value."""
    c, algorithm = config.components, config.algorithm
    group, adaptive = c.group_sampling, c.length_adaptive_gae
    return Hyperparameters(
        value_pretraining_iterations=(
            c.value_pretraining.num_iterations if c.value_pretraining.enabled else 0
        ),
        lambda_critic=c.decoupled_gae.lambda_critic if c.decoupled_gae.enabled else None,
        alpha=adaptive.alpha if adaptive.enabled and adaptive.k is None else None,
        k=adaptive.k if adaptive.enabled else None,
        loss_reduction=(
            "token_mean"
            if c.token_level_loss.enabled
            else _SEQUENCE_REDUCTIONS[algorithm.sequence_reduction]
        ),
        eps_high=c.clip_higher.eps_high if c.clip_higher.enabled else algorithm.eps_low,
        mu=c.positive_example_lm_loss.mu if c.positive_example_lm_loss.enabled else 0.0,
        num_prompts=group.num_prompts if group.enabled else group.num_prompts * group.group_size,
        group_size=group.group_size if group.enabled else 1,
        lambda_policy=algorithm.lambda_policy,
        eps_low=algorithm.eps_low,
        gamma=algorithm.gamma,
        gae_over=algorithm.gae_over,
        reads_old_logprobs=reads_old_logprobs(config),
        verifier_weights=verifier_weights(config),
    )


def verifier_weights(config: FitConfig) -> dict[str, float]:
    """Return the weights of several verifiers by name, or nothing where there is one verifier."""
    if not isinstance(config.rewards, SeveralVerifiers):
        return {}
    return {name: block.weight for name, block in config.rewards.verifiers.items()}


def reads_old_logprobs(config: FitConfig) -> bool:
    """Whether the training reads the policy's log-probs from before an iteration's update.

    They cost a forward pass over all rollouts. These options read them:
    - a surrogate whose ratio is to the old policy (clipped_ratio, gspo, cispo), if an iteration
      has several optimizer steps of the actor. In a single step the ratio is 1 by definition,
      and its gradient is that of the log-prob, which the update's own pass computes. The other
      surrogates divide by the rollouts' own probabilities, or have no ratio;
    - the correction of the engine's mismatch, whose weights and masks are made before the update;
    - a KL penalty in the reward, which is part of the advantages (as a loss, the KL term compares
      the log-probs of the update's own pass with the reference's);
    - a user's own estimator, which gets them;
    - POISE, whose states and entropies come out of this pass, OTB and OPPO.
    The entropy bonus and the positive-example loss read the log-probs of the update's own pass.
    """
    algorithm, correction = config.algorithm, mismatch_of(config)
    has_ratio = algorithm.ratio_to == "old_policy" and num_actor_steps(config) > 1
    is_corrected = correction.weighs or correction.masks
    is_penalised = algorithm.kl.coef > 0 and algorithm.kl.placement == "reward"
    own_columns = OwnEstimatorOptions | PoiseOptions | OtbOptions | OppoOptions
    reads_pass = isinstance(algorithm, own_columns)
    return has_ratio or is_corrected or is_penalised or reads_pass


def num_actor_steps(config: FitConfig) -> int:
    """Return the number of the actor's optimizer steps in an iteration.

    The number of responses is num_prompts * group_size, whether group sampling is on or off.
    """
    group = config.components.group_sampling
    total = group.num_prompts * group.group_size
    return total // (config.training.minibatch_size or total)


def critic_is_punished(config: FitConfig) -> bool:
    """Whether the overlong punishment is in the critic's reward, and so in its value targets."""
    return config.rewards.overlong.soft_punishment and config.critic.reward == "shaped"


def compares_groups(config: FitConfig) -> bool:
    """Whether estimator, baseline or critic compare the responses to one prompt.

    If so, a group must stay whole.
    """
    algorithm, critic = config.algorithm, config.critic
    by_critic = critic.weights == "prompt_noise" or critic.target == "residual"
    return algorithm.compares_groups or algorithm.baseline.is_of_group or by_critic


STALE_TIS_CAP = 2.0


def mismatch_of(config: FitConfig) -> MismatchConfig:
    """Return the mismatch options of a config, with the default correction for stale rollouts.

    `training.max_staleness` above 0 turns truncated importance sampling on, unless IcePop is on,
    the surrogate divides by the rollouts' own probabilities already (dis, dppo_tv), or the
    estimator imitates whoever wrote them (correct_only).
    """
    algorithm, mismatch = config.algorithm, config.algorithm.mismatch
    has_own = algorithm.ratio_to == "rollout_policy"
    imitates = algorithm.advantage_estimator == "correct_only"
    is_off = config.training.max_staleness == 0 or not mismatch.correct_stale
    if is_off or has_own or imitates or mismatch.weighs:
        return mismatch
    return replace(mismatch, tis_cap=STALE_TIS_CAP)


def is_first_last_or_nth(number: int, every_n: int | None, *, is_last: bool) -> bool:
    """Whether an iteration of a phase, counted from 1, is its first, its last or an n-th one.

    With `every_n` None no iteration is.
    """
    return every_n is not None and (number == 1 or is_last or number % every_n == 0)


def evaluated_iterations(config: FitConfig) -> list[int]:
    """Return the policy's iterations, from 1, after which a run evaluates; the last is one."""
    last, every = config.training.num_iterations, config.evaluation.every_n_iterations
    return [*range(every, last, every), *([last] if last else [])]
