"""One iteration's rollouts: prompts, responses, verdicts, and what else their baseline needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from vapo.config import FitConfig, resolve
from vapo.config.estimators import MilestonesOptions, VineOptions
from vapo.functional.columns import with_loss_on
from vapo.prompts.load import PromptSplit
from vapo.prompts.training_set import group_sampling
from vapo.rewards.scorer import with_shuffled_verdicts
from vapo.rollouts.batch import (
    configured_batch,
    prompt_scores,
    source_metrics,
    verifier_metrics,
)
from vapo.rollouts.continuations import ContinuationSampler, with_step_values
from vapo.rollouts.engines.contract import SamplingSettings, sampling_settings
from vapo.rollouts.episodes import EpisodeLoop
from vapo.rollouts.milestones import with_milestone_values
from vapo.rollouts.player import RolloutRunner
from vapo.system.distributed import (
    gather_over_ranks,
    max_over_ranks,
    rank,
    sum_over_ranks,
    world_size,
)
from vapo.system.process import derive_seed
from vapo.system.progress import Progress, Stage
from vapo.types import Phase, Prompt, Rollout, RolloutBatch

Group = list[Rollout]
"""All responses to one prompt."""


def is_mixed(group: Group) -> bool:
    """Whether a group has both right and wrong verdicts; its rewards do not matter.

    A group with an episode whose environment failed is not trained on, and counts as not mixed.
    """
    if any(rollout.is_lost for rollout in group):
        return False
    return len({rollout.is_correct for rollout in group}) == 2


class GroupCollector:
    """Collects groups for a batch, attempt by attempt, until there are enough mixed ones.

    DAPO's dynamic sampling: prompts whose responses are all right or all wrong give no gradient,
    as the advantages of such a group are 0, so other prompts are sampled in their place.
    Mixed groups beyond `num_groups` are left out. If there are too few after the last attempt,
    dropped groups fill the batch, the earliest first and those with a lost episode last. So every
    rank keeps its number of rows, and hence of minibatches. Fillers carry no loss, so the gradient
    is that of the smaller batch.

    Source: DAPO (2503.14476), section 3.2.

    Args:
        num_groups: the groups of this rank; each attempt samples at least as many.
        max_attempts: the largest number of attempts; 0: one attempt, all of whose groups are taken.
    """

    def __init__(self, *, num_groups: int, max_attempts: int) -> None:
        self.num_groups, self.max_attempts = num_groups, max_attempts
        self.attempts = 0
        self.sampled: list[Group] = []
        self.groups: list[Group] = []  # the batch's: usable ones, then the fillers
        self.fillers: list[Group] = []  # the groups of the batch that carry no loss
        self.is_full = False
        """True when all ranks' batches are complete, or no attempt is left."""

    def add(self, groups: list[Group]) -> None:
        """Add the groups of an attempt, and set `groups`, `fillers` and `is_full` accordingly.

        If several attempts are allowed, every rank must call this: all ranks make another attempt
        as long as one of them lacks groups.
        """
        self.sampled += groups
        self.attempts += 1
        usable, dropped = list[Group](), list[Group]()
        for group in self.sampled:
            (usable if self.max_attempts == 0 or is_mixed(group) else dropped).append(group)
        num_missing = max(0, self.num_groups - len(usable))
        dropped.sort(key=lambda group: any(rollout.is_lost for rollout in group))  # lost last
        self.fillers = dropped[:num_missing]
        self.groups = [*usable[: self.num_groups], *self.fillers]
        is_last = self.attempts >= self.max_attempts
        self.is_full = is_last or int(max_over_ranks(torch.tensor(num_missing))) <= 0

    def metrics(self) -> dict[str, float]:
        """Return the metrics of dynamic sampling, over all ranks; without it there are none."""
        if self.max_attempts == 0:
            return {}
        is_correct = [bool(rollout.is_correct) for group in self.sampled for rollout in group]
        num_dropped = sum(not is_mixed(group) for group in self.sampled)
        counts = [num_dropped, len(self.fillers), sum(is_correct), len(is_correct)]
        num_dropped, num_fillers, num_correct, num = sum_over_ranks(torch.tensor(counts)).tolist()
        return {
            "rollout/dynamic_sampling_attempts": float(self.attempts),
            "rollout/dropped_groups": float(num_dropped),
            "rollout/filler_groups": float(num_fillers),
            "rollout/sampled_accuracy": num_correct / num,
        }


class RolloutCollection:
    """Samples and judges the rollouts of an iteration, and makes a batch of them. A run has one.

    The rollouts are a function of (seed, iteration) and the sampler's weights. There is no state
    between calls, so an iteration can be repeated.
    """

    def __init__(
        self, config: FitConfig, *, prompts: PromptSplit, player: RolloutRunner, progress: Progress
    ) -> None:
        self.config = config
        self.hyperparameters = resolve(config)
        self.settings = sampling_settings(config.rollouts)
        self.prompts = prompts
        self.player = player
        self.progress = progress

    def sample_batch(self, iteration: int, phase: Phase) -> tuple[RolloutBatch, dict[str, float]]:
        """Sample and judge the iteration's rollouts. Return them with the metrics of sampling.

        Every rank must call this; all make the same number of attempts.

        Args:
            phase: the phase that trains on the batch; value pretraining keeps all prompts.
        """
        collector = self.group_collector(phase)
        while not collector.is_full:
            collector.add(self.sample_groups(iteration, collector.attempts))
        return self.batch_of(collector, iteration)

    def group_collector(self, phase: Phase) -> GroupCollector:
        """Return an empty collector of the groups that this rank adds to a batch of the phase.

        Value pretraining keeps all prompts, so its collector takes the groups of one attempt.
        """
        is_kept_whole = phase is Phase.VALUE_PRETRAINING
        max_attempts = 0 if is_kept_whole else self.config.algorithm.dynamic_sampling_attempts
        return GroupCollector(num_groups=self.num_groups, max_attempts=max_attempts)

    @property
    def num_groups(self) -> int:
        """The number of this rank's prompts in a batch."""
        return self.hyperparameters.num_prompts // world_size()

    def batch_of(
        self, collector: GroupCollector, iteration: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Make the batch of the collected groups, and return it with the metrics of sampling.

        It has the baselines that the advantage estimator needs. Every rank must call this.
        """
        batch = configured_batch(
            [rollout for group in collector.groups for rollout in group],
            self.config,
            group_size=self.hyperparameters.group_size,
        )
        batch = replace(batch, sampled_groups=prompt_scores(collector.sampled))
        metrics = collector.metrics()
        metrics |= source_metrics(batch, self.prompts.training, iteration=iteration)
        metrics |= verifier_metrics(batch, self.config.rewards)
        metrics |= self.player.scorer.failures(batch.rollouts)
        if num_fillers := len(collector.fillers):
            carries_loss = torch.ones(len(batch), dtype=torch.bool)
            carries_loss[-num_fillers * batch.group_size :] = False
            batch = with_loss_on(batch, carries_loss)
        batch, baseline_metrics = self.with_baselines(batch, self.settings, iteration)
        return batch, metrics | baseline_metrics

    def attempt_prompts(self, iteration: int, attempt: int) -> list[Prompt]:
        """Return this rank's prompts of an attempt, which is counted from 0 in each iteration.

        Attempt 0 takes the iteration's prompts, which depend on the run's seed alone. Each later
        attempt takes its prompts from another order of the data.
        """
        seed = self.config.seed
        return group_sampling(
            self.prompts.training,
            num_prompts=self.hyperparameters.num_prompts,
            seed=seed if attempt == 0 else derive_seed(seed, "attempt", attempt),
            iteration=iteration,
            rank=rank(),
            world_size=world_size(),
        )

    def sample_groups(self, iteration: int, attempt: int) -> list[Group]:
        """Sample and judge the responses to this rank's prompts of an attempt.

        The groups are a function of (seed, iteration, attempt) and the policy.
        """
        rollouts = sample_and_score(
            self.attempt_prompts(iteration, attempt),
            self.player,
            self.progress.stage,
            group_size=self.hyperparameters.group_size,
            settings=self.settings,
            seed=derive_seed(self.config.seed, "rollouts", *_attempt_keys(iteration, attempt)),
        )
        return self.groups(rollouts, iteration, attempt)

    def groups(self, rollouts: list[Rollout], iteration: int, attempt: int) -> list[Group]:
        """Cut an attempt's rollouts into groups, one for each prompt.

        If `rewards.shuffle` is set, verdicts are first exchanged at random among the rollouts.
        """
        rows = self._shuffled(rollouts, "shuffled verdicts", *_attempt_keys(iteration, attempt))
        size = self.hyperparameters.group_size
        return [rows[first : first + size] for first in range(0, len(rows), size)]

    def loop_ahead(self, version: Callable[[], int]) -> AbstractContextManager[EpisodeLoop]:
        """Return a context in which a loop plays episodes ahead of the trainer.

        Each turn records what `version` returned, the number of the engine's weights, when the turn
        was requested.
        """
        return self.player.loop(
            self.settings,
            seed=derive_seed(self.config.seed, "rollouts ahead", rank()),
            num_responses=self.num_groups * self.hyperparameters.group_size,
            version=version,
        )

    def with_baselines(
        self, batch: RolloutBatch, settings: SamplingSettings, iteration: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Return the batch with the baselines that its advantage estimator needs, and metrics.

        These are rewards of greedy responses, or values of steps. `settings` are the ones with
        which the batch was sampled. Every rank must call this.
        """
        algorithm, metrics = self.config.algorithm, {}
        if algorithm.needs_greedy_baseline:
            prompts = [rollout.prompt for rollout in batch.rollouts[:: batch.group_size]]
            baseline = self._greedy_rewards(prompts, iteration)
            batch = replace(batch, baseline_rewards=baseline.repeat_interleave(batch.group_size))
            metrics["rollout/greedy_reward_mean"] = float(gather_over_ranks(baseline).mean())
        if isinstance(algorithm, VineOptions):
            seed = derive_seed(self.config.seed, "continuations", iteration, rank())
            batch, estimator_metrics = with_step_values(
                batch, self.continuation_sampler(settings), seed=seed
            )
            metrics |= estimator_metrics
        if isinstance(algorithm, MilestonesOptions):
            options, tokenizer = algorithm.milestones, self.player.tokenizer
            batch, estimator_metrics = with_milestone_values(batch, options, tokenizer)
            metrics |= estimator_metrics
        return batch, metrics

    def continuation_sampler(self, settings: SamplingSettings) -> ContinuationSampler:
        """Return an object that continues responses, which were sampled with these settings."""
        return ContinuationSampler(self.config, settings, self.player, self.progress.stage)

    def _greedy_rewards(self, prompts: list[Prompt], iteration: int) -> Tensor:
        """Sample one greedy response to each prompt, and return their rewards, one for each."""
        rollouts = sample_and_score(
            prompts,
            self.player,
            self.progress.stage,
            group_size=1,
            settings=replace(self.settings, greedy=True),
            seed=derive_seed(self.config.seed, "greedy rollouts", iteration, rank()),
        )
        rows = self._shuffled(rollouts, "shuffled greedy verdicts", iteration, rank())
        return configured_batch(rows, self.config, group_size=1).rewards

    def _shuffled(self, rollouts: list[Rollout], *keys: str | int) -> list[Rollout]:
        """Return the rollouts; if `rewards.shuffle` is set, with verdicts exchanged at random.

        `keys` and the run's seed determine the order.
        """
        if not self.config.rewards.shuffle:
            return rollouts
        return with_shuffled_verdicts(rollouts, derive_seed(self.config.seed, *keys))


def _attempt_keys(iteration: int, attempt: int) -> tuple[int, ...]:
    """Return the numbers that tell the seeds of iterations, ranks and attempts apart."""
    return (iteration, rank()) if attempt == 0 else (iteration, rank(), attempt)


def sample_and_score(
    prompts: Sequence[Prompt],
    player: RolloutRunner,
    stage: Stage,
    *,
    group_size: int,
    settings: SamplingSettings,
    seed: int,
) -> list[Rollout]:
    """Sample and judge `group_size` responses to each prompt, and return them prompt by prompt.

    `stage` reports the progress.
    """
    total = len(prompts) * group_size
    with stage("rollout", total=total, unit="responses") as advance:
        return player.play(
            prompts, group_size=group_size, settings=settings, seed=seed, advance=advance
        )
