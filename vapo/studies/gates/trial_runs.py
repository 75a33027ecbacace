"""Watchers that measure trial runs: a run's first iterations, the critic alone, the policy
alone.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import Callback

from vapo.advantages.credit import value_token_mask
from vapo.config import FitConfig
from vapo.diagnostics.oracle import explained_variance_of_values, state_values, token_returns
from vapo.studies.gates.rules import Interval
from vapo.system.progress import Progress
from vapo.training.callbacks.recording import mean_of_steps
from vapo.training.callbacks.value_pretraining import explained_now
from vapo.training.datamodule import iteration_of
from vapo.training.iteration import Iteration
from vapo.training.module import VapoModule
from vapo.types import Phase, Rollout, RolloutBatch

StatesOf = Callable[[Rollout], Sequence[str] | None]
"""Returns the task's state before each token of a rollout; None if the states are not known."""


@dataclass
class StateReturns:
    """Collects the task's states in the start policy's rollouts, with the returns from them.

    A procedural task may tell the state before each token, on which alone the value depends. The
    mean return of equal states is then the best value that a critic could give (`oracle`).
    `is_complete` becomes False with the first batch that has a rollout without states.
    """

    config: FitConfig
    states_of: StatesOf
    states: list[Sequence[str]] = field(default_factory=list)
    returns: list[list[float]] = field(default_factory=list)
    is_complete: bool = True

    def add(self, batch: RolloutBatch) -> None:
        """Add the states and returns of a batch, unless it or an earlier one has no states."""
        states = self.states_in(batch) if self.is_complete else None
        if states is None:
            self.is_complete = False
            return
        self.states += states
        self.returns += token_returns(batch, self.config)

    def states_in(self, batch: RolloutBatch) -> list[Sequence[str]] | None:
        """Return the state before each token of each rollout; None if a rollout has no states."""
        rows = [self.states_of(rollout) for rollout in batch.rollouts]
        states = [row for row in rows if row is not None]
        return states if len(states) == len(rows) else None

    def oracle(self, heldout: RolloutBatch) -> float | None:
        """Return the explained variance of the states' mean returns on held-out rollouts.

        It is the best that a critic could reach. It is None if nothing was collected, or if states
        of any rollout are not known.
        """
        states = self.states_in(heldout) if self.is_complete and self.states else None
        if states is None:
            return None
        values = state_values(self.states, self.returns, states)
        return explained_variance_of_values(values, token_returns(heldout, self.config))


class HeldOutValues(NamedTuple):
    """A critic's explained variance on held-out rollouts, and its mean value at their middle
    token.
    """

    explained_variance: float
    middle: float


def heldout_values(module: VapoModule, batch: RolloutBatch) -> HeldOutValues:
    """Measure the critic's present values on held-out rollouts.

    The middle token is counted among the tokens that have a value. These are the sampled tokens, or
    one for each turn.
    """
    evaluated, explained = explained_now(module, batch)
    places = value_token_mask(batch, module.hyperparameters)
    is_middle = places & (places.cumsum(dim=1) - 1 == places.sum(dim=1, keepdim=True) // 2)
    return HeldOutValues(explained, float(evaluated.values[is_middle].double().mean()))


@dataclass(eq=False, repr=False)
class TrialWatcher(Callback, ABC):
    """Measures a trial run's networks before the first update and after each iteration.

    The figures after an iteration are shown as progress. A subclass ends the trial run when its
    measurement is over.
    """

    progress: Progress

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, VapoModule)
        if batch_idx == 0 and iteration_of(trainer).number == 1:
            self.measure_start(pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        figures, is_over = self.measure_iteration(pl_module, iteration_of(trainer))
        self.progress.metrics(figures)
        trainer.should_stop = trainer.should_stop or is_over

    def measure_start(self, module: VapoModule) -> None:
        """Measure the networks before their first update.

        The critic's head is initialized by then.
        """

    @abstractmethod
    def measure_iteration(
        self, module: VapoModule, iteration: Iteration
    ) -> tuple[dict[str, float], bool]:
        """Measure the networks after an iteration.

        Return (name -> figure to show, whether the trial run is over).
        """


@dataclass(eq=False, repr=False)
class CriticWatcher(TrialWatcher):
    """Measures the critic on held-out rollouts while the policy is still the start policy.

    It collects the mean lengths of the start policy's training batches. If `state_returns` is not
    None, it collects the task's states in them there.
    """

    heldout: RolloutBatch
    state_returns: StateReturns | None
    start_lengths: list[float] = field(default_factory=list, init=False)

    def add_start_rollouts(self, iteration: Iteration) -> None:
        """Add the mean response length, and the task's states, of an iteration's rollouts.

        The iteration must not train the policy, so that the start policy sampled them.
        """
        self.start_lengths.append(iteration.metrics["rollout/response_length_mean"])
        if self.state_returns is not None:
            self.state_returns.add(iteration.batch)


@dataclass(eq=False, repr=False)
class Beginning(CriticWatcher):
    """Measures the first trial run, which trains as configured: value pretraining, then the policy.

    Attributes:
        pretraining: the critic's held-out values before value pretraining and after each of its
            iterations.
        clip_fractions, shares_right, length_variations: a number for each policy iteration.
        prompts: the prompt id of each group in the policy's iterations.
    """

    pretraining: list[HeldOutValues] = field(default_factory=list, init=False)
    clip_fractions: list[float] = field(default_factory=list, init=False)
    shares_right: list[float] = field(default_factory=list, init=False)
    length_variations: list[float] = field(default_factory=list, init=False)
    prompts: list[str] = field(default_factory=list, init=False)

    def measure_start(self, module: VapoModule) -> None:
        self.pretraining.append(heldout_values(module, self.heldout))

    def measure_iteration(
        self, module: VapoModule, iteration: Iteration
    ) -> tuple[dict[str, float], bool]:
        if iteration.phase is Phase.VALUE_PRETRAINING:
            self.pretraining.append(heldout_values(module, self.heldout))
            self.add_start_rollouts(iteration)
            return self.pretraining[-1]._asdict(), False
        clipped = mean_of_steps(module.minibatch_metrics).get("actor/clip_fraction_high", math.nan)
        lengths = iteration.batch.response_lengths.tolist()
        self.clip_fractions.append(clipped)
        self.shares_right.append(iteration.metrics["rollout/accuracy"])
        self.length_variations.append(statistics.pstdev(lengths) / statistics.fmean(lengths))
        groups = iteration.batch.rollouts[:: iteration.batch.group_size]
        self.prompts += [rollout.prompt.prompt_id for rollout in groups]
        return {"right": self.shares_right[-1], "clipped above": clipped}, False

    @property
    def share_returned(self) -> float:
        """The share of the groups whose prompt had another group before."""
        return 1 - len(set(self.prompts)) / len(self.prompts)


@dataclass(eq=False, repr=False)
class Unlearning(CriticWatcher):
    """Measures a critic that is trained alone, until its value at the middle is above a guess's.

    The run ends when the value is above the upper limit of the guess's interval, or above the
    guess's mean if the interval has no limits.
    """

    guess: Interval
    middles: list[float] = field(default_factory=list, init=False)

    def measure_start(self, module: VapoModule) -> None:
        self.middles.append(heldout_values(module, self.heldout).middle)

    def measure_iteration(
        self, module: VapoModule, iteration: Iteration
    ) -> tuple[dict[str, float], bool]:
        self.middles.append(heldout_values(module, self.heldout).middle)
        self.add_start_rollouts(iteration)
        last = self.guess.high if math.isfinite(self.guess.high) else self.guess.mean
        return {"value at the middle": self.middles[-1]}, self._first_above(last) is not None

    @property
    def unlearned_after(self) -> int | None:
        """The iterations until the value was above the guess's mean. None if it never was."""
        return self._first_above(self.guess.mean)

    @property
    def unlearned_between(self) -> tuple[int | None, int | None]:
        """The iterations until the value was above the lower and the upper limit of the interval.

        None stands for a limit that the value never passed.
        """
        return self._first_above(self.guess.low), self._first_above(self.guess.high)

    def _first_above(self, value: float) -> int | None:
        return next((n for n, middle in enumerate(self.middles) if middle > value), None)


@dataclass(eq=False, repr=False)
class Collapse(TrialWatcher):
    """Measures a policy that is trained alone, until its responses are half as long as at first.

    An iteration's rollouts are sampled before its own update. If sampling runs ahead, they are
    `rollout/staleness_max` updates older still.

    Attributes:
        start_lengths: mean lengths of the start policy's training batches in earlier trial runs.
            `start_length` is the mean of them and this run's first batch, as one batch may be far
            off.
        lengths: lengths[n] is the mean length after n updates.
    """

    start_lengths: Sequence[float]
    lengths: list[float] = field(default_factory=list, init=False)

    def measure_iteration(
        self, module: VapoModule, iteration: Iteration
    ) -> tuple[dict[str, float], bool]:
        updates = iteration.number - 1 - int(iteration.metrics["rollout/staleness_max"])
        self.lengths[updates:] = [iteration.metrics["rollout/response_length_mean"]]
        return {"response length": self.lengths[-1]}, self.collapsed_after is not None

    @property
    def collapsed_after(self) -> int | None:
        """The updates after which responses were less than half as long as the start policy's.

        None if they never were.
        """
        half = self.start_length / 2
        return next((n for n, length in enumerate(self.lengths) if length < half), None)

    @property
    def start_length(self) -> float:
        """The mean response length of the start policy, over batches."""
        return statistics.fmean([*self.start_lengths, self.lengths[0]])
