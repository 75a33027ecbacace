"""Forecast what a whole run will need, from what a smoke test of it measured. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from vapo.config import FitConfig, resolve
from vapo.config.hyperparameters import evaluated_iterations, is_first_last_or_nth

OTHER = "other"
"""The time in no stage: importing libraries and reading data at the start, minibatches, records."""
PRETRAINING, POLICY = "value_pretraining", "policy_optimization"
_VALUE_PAGE, _CONTINUATIONS = "value_page", "continuations"
_OTHER_TIMES = ("evaluation", "checkpoint")
"""Stages that do not run in each iteration. How often they run is counted separately."""


@dataclass(frozen=True)
class RunPart:
    """One part of a session: its start, or one iteration.

    Attributes:
        name: "start", or the iteration's phase.
        seconds: stage -> the time that it took.
        host, gpu: stage -> the most bytes of memory in use while it ran.
    """

    name: str
    seconds: dict[str, float] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    gpu: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Session:
    """What one session of a smoke test measured, from its start to its last checkpoint.

    Attributes:
        parts: the start, then each iteration.
        checkpoint_bytes: the size of a checkpoint.
        num_kept: how many checkpoints the run keeps.
        critic_bytes: the size of the pretrained critic.
        num_evaluated: how many responses one evaluation samples.
        gpu_bytes: the memory of the GPU; None without one.
    """

    parts: list[RunPart]
    checkpoint_bytes: int
    num_kept: int
    critic_bytes: int
    num_evaluated: int
    gpu_bytes: int | None = None

    @staticmethod
    def of(tree: Mapping[str, Any]) -> Session:
        """Return the session from which `dataclasses.asdict` made this tree."""
        parts = [RunPart(**part) for part in tree["parts"]]
        return Session(**{**tree, "parts": parts})


@dataclass(frozen=True)
class Item:
    """Something that a run does several times: how often, and the seconds that each time takes."""

    name: str
    times: int
    seconds: float

    @property
    def total(self) -> float:
        return self.times * self.seconds


@dataclass(frozen=True)
class Forecast:
    """What a whole run will need.

    Attributes:
        items: the parts of its time.
        responses: stage -> how many responses it samples.
        disk_written: bytes written during the whole run.
        disk_held: the most bytes on disk at a time.
    """

    items: list[Item]
    responses: dict[str, int]
    disk_written: int
    disk_held: int

    @property
    def seconds(self) -> float:
        return sum(item.total for item in self.items)


def forecast(config: FitConfig, sessions: Sequence[Session]) -> Forecast:
    """Return what a whole run of the config will need, from the sessions of a smoke test.

    An iteration is expected to take the mean time of the measured ones in its phase, with the time
    between its stages. The stages that do not run in each iteration are counted on their own, with
    their mean time. What was not measured, or took no time, is left out.
    """
    numbers, parts = resolve(config), [part for session in sessions for part in session.parts]
    pretraining = numbers.value_pretraining_iterations if config.algorithm.has_critic else 0
    policy, saves = config.training.num_iterations, checkpoint_iterations(config)
    evaluated = evaluated_iterations(config)
    num_evaluations = 1 + len(evaluated) + (config.evaluation.average_policies is not None)
    pages = num_due(pretraining, config.value_pages.every_n_iterations)
    pages += num_due(policy, config.value_pages.every_n_iterations)
    separate = separate_stages(config)
    items = [
        Item("start", 1, sum(_without(sessions[0].parts[0], _OTHER_TIMES))),
        Item("evaluation", num_evaluations, _mean_of_stage(parts, "evaluation")),
    ]
    for name, phase, times in (
        ("iteration of value pretraining", PRETRAINING, pretraining),
        ("iteration of the policy", POLICY, policy),
    ):
        totals = [sum(_without(part, separate)) for part in parts if part.name == phase]
        items += [Item(name, times, fmean(totals))] if totals else []
    items.append(Item("value page", pages, _mean_of_stage(parts, _VALUE_PAGE)))
    if _CONTINUATIONS in separate:
        every_n = config.value_truth.every_n_iterations
        measured = num_due(policy, every_n)
        if config.components.value_pretraining.data is None:
            measured += num_due(pretraining, every_n)
        seconds = _mean_of_stage(parts, _CONTINUATIONS)
        items.append(Item("measurement of true values", measured, seconds))
    items.append(Item("checkpoint", len(saves), _mean_of_stage(parts, "checkpoint")))
    is_stored = config.components.value_pretraining.data is not None
    size = max(session.checkpoint_bytes for session in sessions)
    critic = max(session.critic_bytes for session in sessions)
    return Forecast(
        [item for item in items if item.total > 0],
        {
            "value pretraining": 0 if is_stored else pretraining * numbers.num_responses,
            "the policy's training": policy * numbers.num_responses,
            "evaluations": num_evaluations * sessions[0].num_evaluated,
        },
        disk_written=len(saves) * size + critic,
        disk_held=(min(sessions[0].num_kept + 1, len(saves)) + 1) * size + critic,
    )


def checkpoint_iterations(config: FitConfig) -> list[int]:
    """Return the iterations after which a run saves a checkpoint.

    Iterations are counted over both phases, from 1. The list is the longest possible: it assumes
    that each evaluated policy has the best score so far, and is saved for that.
    """
    numbers, every = resolve(config), config.checkpoints.every_n_iterations
    pretraining = numbers.value_pretraining_iterations if config.algorithm.has_critic else 0
    last = pretraining + config.training.num_iterations
    best = {pretraining + number for number in evaluated_iterations(config)}
    return sorted({*range(every, last + 1, every), last, *best})


def num_due(num_iterations: int, every_n: int | None) -> int:
    """Return how often something runs in a phase: in the first, the last, and each n-th iteration.

    Args:
        num_iterations: the iterations of the phase.
        every_n: None stands for never.
    """
    numbers = range(1, num_iterations + 1)
    return sum(is_first_last_or_nth(n, every_n, is_last=n == num_iterations) for n in numbers)


def separate_stages(config: FitConfig) -> tuple[str, ...]:
    """Return the stages that do not run in each iteration, and are counted separately.

    The measurement of true values by continuations is one if the config has it. With the estimator
    `vine` each iteration samples continuations anyway, so it is not.
    """
    stages = (*_OTHER_TIMES, _VALUE_PAGE)
    is_of_each = config.algorithm.advantage_estimator == "vine"
    is_measured = config.value_truth.every_n_iterations is not None
    return (*stages, _CONTINUATIONS) if is_measured and not is_of_each else stages


def _without(part: RunPart, stages: Sequence[str]) -> list[float]:
    return [seconds for stage, seconds in part.seconds.items() if stage not in stages]


def _mean_of_stage(parts: Sequence[RunPart], stage: str) -> float:
    """Return the mean seconds of a stage in the iterations (or the start) that have it, or 0.0."""
    return fmean([part.seconds[stage] for part in parts if stage in part.seconds] or [0.0])


def session_file(folder: Path, last: int) -> Path:
    """Return the path of the file into which the session up to iteration `last` writes its
    figures.
    """
    return folder / f"session_{last}.json"
