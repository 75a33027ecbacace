"""Choose what a value page shows of a batch, and say how it was computed and what is missing."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.advantages.credit import advantages_and_targets, gae_lambdas, spread_over_steps
from vapo.advantages.estimators import policy_and_critic_rewards
from vapo.config import FitConfig, resolve
from vapo.config.values import ValuePagesConfig
from vapo.diagnostics.position_profiles import Profile, returns_of_tokens, value_calibration
from vapo.diagnostics.value_page.row_choice import rows_to_show
from vapo.diagnostics.value_page.truth import truth_columns
from vapo.diagnostics.value_truth.measure import ValueTruth
from vapo.system.distributed import world_size
from vapo.system.process import derive_seed
from vapo.types import Phase, TrainingBatch


@dataclass(frozen=True)
class ChosenGroup:
    """A group of responses to one prompt that the page shows, and the reason why it was chosen.

    Attributes:
        index: the number of the group in the batch.
        num_tokens: row of the batch -> how many of its first tokens are shown. Other rows of the
            group are not shown.
    """

    index: int
    reason: str
    num_tokens: dict[int, int]


@dataclass(frozen=True)
class PageContents:
    """Everything that a value page shows.

    Attributes:
        batch: this rank's rollouts, from which `groups` are chosen.
        columns: name -> a number for each token.
        lambdas: the policy's lambda of each response; None without a critic or advantages.
        positions: the profile by position, over all ranks.
        calibration: the calibration of the values, over all ranks.
        truth: prefixes of this rank's batch whose true value was measured; None if there are none.
    """

    batch: TrainingBatch
    columns: dict[str, Float[Tensor, "B T"]]
    lambdas: Float[Tensor, "B 1"] | None
    groups: list[ChosenGroup]
    positions: Profile
    calibration: Profile
    truth: ValueTruth | None = None


def page_contents(
    batch: TrainingBatch,
    config: FitConfig,
    positions: Profile,
    iteration: int,
    truth: ValueTruth | None = None,
) -> PageContents:
    """Choose what a value page shows of a batch. Every rank must call this.

    Args:
        batch: a batch after its advantages are computed.
        positions: its `position_profile`.
        truth: measured true values of the batch. Groups and responses that were measured at every
            step are shown before others.
    """
    if truth is not None and not truth.points:
        truth = None
    hyperparameters = resolve(config)
    columns = token_columns(batch, config)
    if truth is not None:
        columns |= truth_columns(truth, batch)
    groups = groups_to_show(
        batch,
        columns.get("value_error"),
        config.value_pages,
        seed=derive_seed(config.seed, "value page", iteration),
        measured=frozenset() if truth is None else truth.rows,
    )
    lambdas: Tensor | None = None
    if batch.old_values is not None and batch.advantages is not None:
        lambdas = gae_lambdas(batch, hyperparameters)
    calibration = value_calibration(batch, hyperparameters)
    return PageContents(batch, columns, lambdas, groups, positions, calibration, truth)


def groups_to_show(
    batch: TrainingBatch,
    value_errors: Float[Tensor, "B T"] | None,
    settings: ValuePagesConfig,
    *,
    seed: int,
    measured: Collection[int] = (),
) -> list[ChosenGroup]:
    """Choose the groups that the page shows: the best one for each reason, then others at random.

    The groups share `settings.max_tokens` evenly. Later groups get the tokens that a group does not
    use.

    Args:
        value_errors: V - return of each token, for the reasons that need it; None without a critic.
        seed: for the random choice.
        measured: rows whose true values were measured. Their groups are chosen before all others,
            and within a group these rows are shown first.
    """
    total = len(batch) // batch.group_size
    with_truth = {row // batch.group_size for row in measured}
    reasons: dict[int, str] = {}  # chosen group -> why it was chosen

    def candidates() -> list[int]:
        """Return the groups to choose from next: the ones with a measured row, if any are left."""
        remaining = [group for group in range(total) if group not in reasons]
        return [group for group in remaining if group in with_truth] or remaining

    for reason, scores in group_scores(batch, value_errors).items():
        scored = [group for group in candidates() if scores[group] > 0]
        if scored and len(reasons) < settings.num_groups:
            reasons[max(scored, key=lambda group: (scores[group], -group))] = reason
    draw = random.Random(seed)
    while len(reasons) < settings.num_groups and (remaining := candidates()):
        for group in draw.sample(
            remaining, min(len(remaining), settings.num_groups - len(reasons))
        ):
            reasons[group] = "at random"
    groups, budget = [], settings.max_tokens
    for place, (group, reason) in enumerate(reasons.items()):
        rows = range(group * batch.group_size, (group + 1) * batch.group_size)
        num_tokens = rows_to_show(
            rows,
            is_correct=batch.is_correct[rows.start : rows.stop].tolist(),
            lengths=batch.response_lengths[rows.start : rows.stop].tolist(),
            max_responses=settings.max_responses,
            max_tokens=budget // (len(reasons) - place),
            measured=measured,
        )
        budget -= sum(num_tokens.values())
        groups.append(ChosenGroup(group, reason, num_tokens))
    return [group for group in groups if group.num_tokens]


def group_scores(
    batch: TrainingBatch, value_errors: Float[Tensor, "B T"] | None
) -> dict[str, list[float]]:
    """Return reason -> the score of each group.

    The group with the highest score above 0 is shown.
    """

    def token_means(x: Tensor) -> Tensor:
        sizes = torch.where(batch.response_mask, x.double().abs(), 0.0)
        return by_group(sizes.sum(dim=1)) / by_group(batch.response_lengths.double())

    def by_group(x: Tensor) -> Tensor:
        return x.view(-1, batch.group_size).sum(dim=1)

    share = by_group(batch.is_correct.double()) / batch.group_size
    mixed = torch.minimum(share, 1 - share)
    longest = batch.response_lengths.double().view(-1, batch.group_size).amax(dim=1)
    scores: dict[str, Tensor] = {}
    if value_errors is not None:
        error = token_means(value_errors)
        scores["largest value error"] = error
        mixed = torch.where(mixed > 0, mixed + 1e-6 * error, 0.0)  # ties: the larger value error
    scores["right and wrong answers"] = mixed
    if batch.advantages is not None:
        scores["largest advantages"] = token_means(batch.advantages)
    scores["longest response"] = longest
    if value_errors is not None:
        scores["smallest value error"] = 1 / (1 + error)
    return {reason: score.tolist() for reason, score in scores.items()}


def token_columns(batch: TrainingBatch, config: FitConfig) -> dict[str, Float[Tensor, "B T"]]:
    """Return name -> a number for each token, for the columns that the phase and the config have.

    `td_error` is r_t + gamma V(s_{t+1}) - V(s_t) with the rewards of the advantages: with
    `critic.bootstrap_truncated` the reward of a truncated response is its last value. `value_error`
    is V(s_t) - return, `engine_gap` the old log-prob - the engine's. With GAE over turns each token
    has the value, target, return and TD error of its turn.
    """
    numbers = resolve(config)
    returns = returns_of_tokens(batch, numbers)
    values, targets = (
        None if column is None else spread_over_steps(column, batch, numbers)
        for column in (batch.old_values, batch.value_targets)
    )
    columns: dict[str, Tensor | None] = {
        "value": values,
        "value_target": targets,
        "trusted_value": batch.baseline_values,
        "advantage": batch.advantages,
        "unwhitened_advantage": (
            None if batch.raw_advantages is batch.advantages else batch.raw_advantages
        ),
        "return": returns,
        "rollout_logprob": batch.rollout_logprobs,
        "logprob": batch.old_logprobs,
    }
    if values is not None:
        columns["value_error"] = values - returns
        rewards = batch.token_rewards
        if config.critic.bootstrap_truncated:
            rewards, _ = policy_and_critic_rewards(batch, config, bootstraps=True)
        columns["td_error"], _ = advantages_and_targets(
            batch, rewards, values, numbers, lambda_policy=0.0, lambda_critic=0.0
        )
    if batch.ref_logprobs is not None:  # else only the last token has a reward
        columns["token_reward"] = batch.token_rewards
    if batch.old_logprobs is not None:
        columns["engine_gap"] = batch.old_logprobs - batch.rollout_logprobs
        columns["entropy"] = batch.old_entropy
        if bool((batch.importance_weights != 1).any()):  # else nothing was corrected
            columns["importance_weight"] = batch.importance_weights
    return {name: column for name, column in columns.items() if column is not None}


def responses_fact(contents: PageContents) -> str:
    """Return how many responses the batch has, and the share of correct ones, as text."""
    is_correct = contents.batch.is_correct
    return f"{len(is_correct)}, {float(is_correct.double().mean()):.0%} correct"


def estimator_facts(config: FitConfig) -> dict[str, str]:
    """Return the estimator's settings as text: gamma, and with a critic both lambdas."""
    hp = resolve(config)
    facts = {"gamma": f"{hp.gamma:g}"}
    if config.algorithm.has_critic:
        policy_lambda = f"{hp.lambda_policy:g}"
        length = "turns" if hp.gae_over == "turns" else "length"
        if hp.k is not None:
            policy_lambda = f"{hp.k:g}^(1 / {length})"
        elif hp.alpha is not None:
            policy_lambda = f"1 - 1 / ({hp.alpha:g} {length})"
        critic_lambda = "as the policy's" if hp.lambda_critic is None else f"{hp.lambda_critic:g}"
        facts["lambda of the policy"] = policy_lambda
        facts["lambda of the critic"] = critic_lambda
    if config.critic.target == "residual":
        facts["value"] = "the critic's output and the mean reward of the prompt's other responses"
    return facts


def notes(config: FitConfig, phase: Phase) -> Iterator[str]:
    """Yield notes on what the page lacks and why, and on the meaning of its numbers."""
    if not config.algorithm.has_critic:
        yield (
            f"No critic (algorithm.advantage_estimator: {config.algorithm.advantage_estimator}): "
            "no values, value errors, TD errors or calibration."
        )
    if phase is Phase.VALUE_PRETRAINING:
        yield (
            "Value pretraining: the policy is fixed, so there are no advantages, and log-probs "
            "are the engine's."
        )
    elif config.algorithm.whiten_advantages:
        yield (
            "The tokens' advantages are whitened over the batch, as the loss uses them; a token's "
            "details also have it unwhitened. The chart of the mean advantage is before whitening."
        )
    if config.critic.bootstrap_truncated:
        yield (
            "critic.bootstrap_truncated: at the last token of a truncated response the TD error "
            "counts the value that replaces the reward. The value errors count the reward itself."
        )
    if config.environment.is_used:
        yield (
            "Responses are episodes: what the environment wrote is in grey and has no numbers; "
            "positions and charts count the tokens that the policy sampled."
        )
    if config.algorithm.gae_over == "turns":
        yield (
            "GAE over turns: a turn is one action, and each of its tokens has the turn's value, "
            "return, advantage and TD error."
        )
    if world_size() > 1:
        yield "The groups are the first process's; the charts cover the rollouts of all processes."
