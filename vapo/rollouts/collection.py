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
    make_rollout_batch,
    prompt_scores,
    source_metrics,
    verifier_metrics,
)
from vapo.rollouts.continuations import Continuer, with_step_values
from vapo.rollouts.engines.contract import SamplingSettings, sampling_settings
from vapo.rollouts.episodes import EpisodeLoop
from vapo.rollouts.milestones import with_milestone_values
from vapo.rollouts.player import Player
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
    """Whether verdicts (not shaped rewards) are neither all right nor all wrong.

    A group that lost an episode to its environment is not trained on.
    """
    if any(rollout.is_lost for rollout in group):
        return False
    return len({rollout.is_correct for rollout in group}) == 2


class Filling:
    """Groups for a batch, added attempt by attempt until there are enough mixed ones.

    DAPO's dynamic sampling: prompts whose responses are all right or all wrong give no gradient,
    as the advantages of such a group are 0, so other prompts are sampled in their place.
    Mixed groups beyond `num_groups` are left out. What is missing after the last attempt is filled
    with dropped groups, the earliest first: every rank keeps its number of rows, hence of
    minibatches, and as fillers carry no loss the gradient is that of the smaller batch.

    Source: DAPO (2503.14476), section 3.2.

    Args:
        num_groups: of this rank; so many groups has an attempt at least.
        max_attempts: 0: all groups are taken, mixed or not, and one attempt has them.
    """

    def __init__(self, *, num_groups: int, max_attempts: int) -> None:
        self.num_groups, self.max_attempts = num_groups, max_attempts
        self.attempts = 0
        self.sampled: list[Group] = []
        self.groups: list[Group] = []  # the batch's: those that are wanted, then the fillers
        self.fillers: list[Group] = []  # those of them that carry no loss
        self.is_full = False
        """Whether no attempt is needed, or allowed, any more: on all ranks after as many."""

    def add(self, groups: list[Group]) -> None:
        """Add an attempt's groups. Every rank must call this where there may be several attempts:
        all go on as long as any of them misses groups."""
        self.sampled += groups
        self.attempts += 1
        wanted, dropped = list[Group](), list[Group]()
        for group in self.sampled:
            (wanted if self.max_attempts == 0 or is_mixed(group) else dropped).append(group)
        num_missing = max(0, self.num_groups - len(wanted))
        dropped.sort(key=lambda group: any(rollout.is_lost for rollout in group))  # sound first
        self.fillers = dropped[:num_missing]
        self.groups = [*wanted[: self.num_groups], *self.fillers]
        is_last = self.attempts >= self.max_attempts
        self.is_full = is_last or int(max_over_ranks(torch.tensor(num_missing))) <= 0

    def metrics(self) -> dict[str, float]:
        """The metrics of dynamic sampling, over all ranks; none without it."""
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
    """Samples and scores; has no state between calls, so an iteration can be repeated.

    Everything is a function of (seed, iteration) and the weights of the sampler.
    """

    def __init__(
        self, config: FitConfig, *, prompts: PromptSplit, player: Player, progress: Progress
    ) -> None:
        self.config = config
        self.hyperparameters = resolve(config)
        self.settings = sampling_settings(config.rollouts)
        self.prompts = prompts
        self.player = player
        self.progress = progress

    def sample_batch(self, iteration: int, phase: Phase) -> tuple[RolloutBatch, dict[str, float]]:
        """Sample and judge the iteration's rollouts; also returns the metrics of sampling.

        Every rank must call this, and makes as many attempts as the others.

        Args:
            phase: the phase that trains on them; value pretraining keeps all prompts.
        """
        filling = self.filling(phase)
        while not filling.is_full:
            filling.add(self.sample_groups(iteration, filling.attempts))
        return self.batch_of(filling, iteration)

    def filling(self, phase: Phase) -> Filling:
        """How this rank's part of a batch that the phase trains on is filled."""
        is_kept_whole = phase is Phase.VALUE_PRETRAINING
        max_attempts = 0 if is_kept_whole else self.config.algorithm.dynamic_sampling_attempts
        return Filling(num_groups=self.num_groups, max_attempts=max_attempts)

    @property
    def num_groups(self) -> int:
        """How many prompts of a batch are this rank's."""
        return self.hyperparameters.num_prompts // world_size()

    def batch_of(self, filling: Filling, iteration: int) -> tuple[RolloutBatch, dict[str, float]]:
        """The batch of sampled and judged groups, with its baselines, and the metrics of sampling.

        Every rank must call this.
        """
        batch = self._rollout_batch(
            [rollout for group in filling.groups for rollout in group],
            group_size=self.hyperparameters.group_size,
        )
        batch = replace(batch, sampled_groups=prompt_scores(filling.sampled))
        metrics = filling.metrics()
        metrics |= source_metrics(batch, self.prompts.training, iteration=iteration)
        metrics |= verifier_metrics(batch, self.config.rewards)
        metrics |= self.player.scorer.failures(batch.rollouts)
        if num_fillers := len(filling.fillers):
            carries_loss = torch.ones(len(batch), dtype=torch.bool)
            carries_loss[-num_fillers * batch.group_size :] = False
            batch = with_loss_on(batch, carries_loss)
        batch, found = self.with_baselines(batch, self.settings, iteration)
        return batch, metrics | found

    def attempt_prompts(self, iteration: int, attempt: int) -> list[Prompt]:
        """This rank's prompts of an attempt.

        Attempt 0 takes the prompts that every system takes in this iteration; each later one
        takes another order.
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
        """This rank's prompts of an attempt, each with its responses, judged.

        Everything is a function of (seed, iteration, attempt) and the policy.
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
        """The groups of an attempt's rollouts, which are contiguous."""
        dealt = self._shuffled(rollouts, "shuffled verdicts", *_attempt_keys(iteration, attempt))
        size = self.hyperparameters.group_size
        return [dealt[first : first + size] for first in range(0, len(dealt), size)]

    def loop_ahead(self, version: Callable[[], int]) -> AbstractContextManager[EpisodeLoop]:
        """Opens the engine; each turn is recorded with the version at which it was asked for."""
        return self.player.loop(
            self.settings,
            seed=derive_seed(self.config.seed, "rollouts ahead", rank()),
            num_responses=self.num_groups * self.hyperparameters.group_size,
            version=version,
        )

    def with_baselines(
        self, batch: RolloutBatch, settings: SamplingSettings, iteration: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """The batch with what the estimator compares its rewards with, and the metrics of that.

        `settings` are those by which the batch was sampled. Every rank must call this.
        """
        algorithm, metrics = self.config.algorithm, {}
        if algorithm.needs_greedy_baseline:
            prompts = [rollout.prompt for rollout in batch.rollouts[:: batch.group_size]]
            baseline = self._greedy_rewards(prompts, iteration)
            batch = replace(batch, baseline_rewards=baseline.repeat_interleave(batch.group_size))
            metrics["rollout/greedy_reward_mean"] = float(gather_over_ranks(baseline).mean())
        if isinstance(algorithm, VineOptions):
            seed = derive_seed(self.config.seed, "continuations", iteration, rank())
            batch, found = with_step_values(batch, self.continuer(settings), seed=seed)
            metrics |= found
        if isinstance(algorithm, MilestonesOptions):
            options, tokenizer = algorithm.milestones, self.player.tokenizer
            batch, found = with_milestone_values(batch, options, tokenizer)
            metrics |= found
        return batch, metrics

    def continuer(self, settings: SamplingSettings) -> Continuer:
        """What samples on from prefixes of responses that were sampled by `settings`."""
        return Continuer(self.config, settings, self.player, self.progress.stage)

    def _greedy_rewards(self, prompts: list[Prompt], iteration: int) -> Tensor:
        """The reward of one greedy response to each prompt, shaped like the others'."""
        rollouts = sample_and_score(
            prompts,
            self.player,
            self.progress.stage,
            group_size=1,
            settings=replace(self.settings, greedy=True),
            seed=derive_seed(self.config.seed, "greedy rollouts", iteration, rank()),
        )
        dealt = self._shuffled(rollouts, "shuffled greedy verdicts", iteration, rank())
        return self._rollout_batch(dealt, group_size=1).rewards

    def _shuffled(self, rollouts: list[Rollout], *keys: str | int) -> list[Rollout]:
        """The rollouts with each other's verdicts where `rewards.shuffle` says so."""
        if not self.config.rewards.shuffle:
            return rollouts
        return with_shuffled_verdicts(rollouts, derive_seed(self.config.seed, *keys))

    def _rollout_batch(self, rollouts: list[Rollout], *, group_size: int) -> RolloutBatch:
        return make_rollout_batch(
            rollouts,
            group_size=group_size,
            rewards=self.config.rewards,
            max_response_tokens=self.config.rollouts.max_response_tokens,
            critic_truncated=self.config.critic.truncated,
        )


def _attempt_keys(iteration: int, attempt: int) -> tuple[int, ...]:
    """What the seeds of this rank's attempt are derived by."""
    return (iteration, rank()) if attempt == 0 else (iteration, rank(), attempt)


def sample_and_score(
    prompts: Sequence[Prompt],
    player: Player,
    stage: Stage,
    *,
    group_size: int,
    settings: SamplingSettings,
    seed: int,
) -> list[Rollout]:
    """`group_size` responses to each prompt, groups contiguous, judged."""
    total = len(prompts) * group_size
    with stage("rollout", total=total, unit="responses") as advance:
        return player.play(
            prompts, group_size=group_size, settings=settings, seed=seed, advance=advance
        )
