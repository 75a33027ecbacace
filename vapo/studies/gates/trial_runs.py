"""What is measured along each trial run: a run's beginning, the critic alone, the policy alone."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import Callback

from vapo.advantages.credit import value_places
from vapo.config import FitConfig
from vapo.diagnostics.oracle import explained_by, state_values, token_returns
from vapo.studies.gates.rules import Interval
from vapo.system.progress import Progress
from vapo.training.callbacks.recording import mean_of_steps
from vapo.training.callbacks.value_pretraining import explained_now
from vapo.training.datamodule import iteration_of
from vapo.training.iteration import Iteration
from vapo.training.module import VapoModule
from vapo.types import Phase, Rollout, RolloutBatch

StatesOf = Callable[[Rollout], Sequence[str] | None]


@dataclass
class StateReturns:
    """The hidden states of the start policy's tokens with their returns, for an oracle's table.

    `complete` becomes False with the first rollout that has no states.
    """

    config: FitConfig
    states_of: StatesOf
    states: list[Sequence[str]] = field(default_factory=list)
    returns: list[list[float]] = field(default_factory=list)
    complete: bool = True

    def add(self, batch: RolloutBatch) -> None:
        """Take a batch of the start policy's rollouts."""
        states = self.states_in(batch) if self.complete else None
        if states is None:
            self.complete = False
            return
        self.states += states
        self.returns += token_returns(batch, self.config)

    def states_in(self, batch: RolloutBatch) -> list[Sequence[str]] | None:
        """The states before each token; None where a rollout has none."""
        found = [self.states_of(rollout) for rollout in batch.rollouts]
        states = [row for row in found if row is not None]
        return states if len(states) == len(found) else None

    def oracle(self, heldout: RolloutBatch) -> float | None:
        """The explained variance of the states' mean returns on other rollouts; None without
        states. The best that a critic could know (`oracle.state_values`)."""
        states = self.states_in(heldout) if self.complete and self.states else None
        if states is None:
            return None
        values = state_values(self.states, self.returns, states)
        return explained_by(values, token_returns(heldout, self.config))


class HeldOutValues(NamedTuple):
    """What a critic knows of held-out rollouts, and its mean value at their middle tokens."""

    explained_variance: float
    middle: float


def heldout_values(module: VapoModule, batch: RolloutBatch) -> HeldOutValues:
    """The critic's values now, against the Monte-Carlo returns; the middle is of what has values,
    sampled tokens or turns."""
    evaluated, explained = explained_now(module, batch)
    places = value_places(batch, module.hyperparameters)
    is_middle = places & (places.cumsum(dim=1) - 1 == places.sum(dim=1, keepdim=True) // 2)
    return HeldOutValues(explained, float(evaluated.values[is_middle].double().mean()))


@dataclass(eq=False, repr=False)
class TrialWatcher(Callback, ABC):
    """Measures before the first update, when the critic's head has its start, and after each
    iteration; shows what it found."""

    progress: Progress

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, VapoModule)
        if batch_idx == 0 and iteration_of(trainer).number == 1:
            self.before(pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        found, is_over = self.after(pl_module, iteration_of(trainer))
        self.progress.metrics(found)
        trainer.should_stop = trainer.should_stop or is_over

    def before(self, module: VapoModule) -> None:
        """Measure the networks' start."""

    @abstractmethod
    def after(self, module: VapoModule, iteration: Iteration) -> tuple[dict[str, float], bool]:
        """Measure after an iteration; what is to be shown, and whether the trial run is over."""


@dataclass(eq=False, repr=False)
class CriticWatcher(TrialWatcher):
    """Measures the critic on held-out rollouts while the policy is the start's, and keeps the mean
    lengths of that policy's training batches and, with `state_returns`, their states."""

    heldout: RolloutBatch
    state_returns: StateReturns | None
    start_lengths: list[float] = field(default_factory=list, init=False)

    def keep(self, iteration: Iteration) -> None:
        """Take the rollouts of an iteration that does not train the policy."""
        self.start_lengths.append(iteration.metrics["rollout/response_length_mean"])
        if self.state_returns is not None:
            self.state_returns.add(iteration.batch)


@dataclass(eq=False, repr=False)
class Beginning(CriticWatcher):
    """A run's beginning: the critic's held-out values along value pretraining, with the start
    first; then the policy phase's clip fraction, share of right responses, lengths and prompts."""

    pretraining: list[HeldOutValues] = field(default_factory=list, init=False)
    clip_fractions: list[float] = field(default_factory=list, init=False)
    shares_right: list[float] = field(default_factory=list, init=False)
    length_variations: list[float] = field(default_factory=list, init=False)
    prompts: list[str] = field(default_factory=list, init=False)

    def before(self, module: VapoModule) -> None:
        self.pretraining.append(heldout_values(module, self.heldout))

    def after(self, module: VapoModule, iteration: Iteration) -> tuple[dict[str, float], bool]:
        if iteration.phase is Phase.VALUE_PRETRAINING:
            self.pretraining.append(heldout_values(module, self.heldout))
            self.keep(iteration)
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
        """The share of the groups whose prompt had one before."""
        return 1 - len(set(self.prompts)) / len(self.prompts)


@dataclass(eq=False, repr=False)
class Unlearning(CriticWatcher):
    """The critic alone, until its value at the middle is above that of a guess, and above the
    upper limit of what a guess may be worth, where it has one."""

    guess: Interval
    middles: list[float] = field(default_factory=list, init=False)

    def before(self, module: VapoModule) -> None:
        self.middles.append(heldout_values(module, self.heldout).middle)

    def after(self, module: VapoModule, iteration: Iteration) -> tuple[dict[str, float], bool]:
        self.middles.append(heldout_values(module, self.heldout).middle)
        self.keep(iteration)
        last = self.guess.high if math.isfinite(self.guess.high) else self.guess.mean
        return {"value at the middle": self.middles[-1]}, self._first_above(last) is not None

    @property
    def unlearned_after(self) -> int | None:
        """The first number of iterations after which the value is above; None: not yet."""
        return self._first_above(self.guess.mean)

    @property
    def unlearned_between(self) -> tuple[int | None, int | None]:
        """The same for the limits of a guess's value."""
        return self._first_above(self.guess.low), self._first_above(self.guess.high)

    def _first_above(self, value: float) -> int | None:
        return next((n for n, middle in enumerate(self.middles) if middle > value), None)


@dataclass(eq=False, repr=False)
class Collapse(TrialWatcher):
    """The policy alone, until its responses have less than half of their mean length at the start.

    `start_lengths` are the mean lengths of the start policy's training batches so far, which this
    trial run's first joins: one batch alone may be far from the mean.

    An iteration's rollouts are of the policy before its update: the n-th has n - 1 behind it, and
    one fewer where they were sampled ahead.
    """

    start_lengths: Sequence[float]
    lengths: list[float] = field(default_factory=list, init=False)

    def after(self, module: VapoModule, iteration: Iteration) -> tuple[dict[str, float], bool]:
        updates = iteration.number - 1 - int(iteration.metrics["rollout/staleness_max"])
        self.lengths[updates:] = [iteration.metrics["rollout/response_length_mean"]]
        return {"response length": self.lengths[-1]}, self.collapsed_after is not None

    @property
    def collapsed_after(self) -> int | None:
        """The first number of iterations after which the responses are that short."""
        half = self.start_length / 2
        return next((n for n, length in enumerate(self.lengths) if length < half), None)

    @property
    def start_length(self) -> float:
        return statistics.fmean([*self.start_lengths, self.lengths[0]])
