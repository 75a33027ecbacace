"""What a whole run will take, by what a smoke test of it measured. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from vapo.config import FitConfig, resolve
from vapo.config.hyperparameters import evaluated_iterations, is_first_last_or_nth

OTHER = "other"
"""What is in no stage: importing libraries and reading data at the start, minibatches, records."""
PRETRAINING, POLICY = "value_pretraining", "policy_optimization"
_VALUE_PAGE, _CONTINUATIONS = "value_page", "continuations"
_OTHER_TIMES = ("evaluation", "checkpoint")
"""Stages that have a number of times of their own, and are not of each iteration."""


@dataclass(frozen=True)
class RunPart:
    """The start of a session, or one of its iterations: seconds and peaks in bytes, by stage."""

    name: str
    seconds: dict[str, float] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    gpu: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Session:
    """What a session of a smoke test measured.

    `num_evaluated` are the responses of one evaluation, `gpu_bytes` the memory of the GPU.
    """

    parts: list[RunPart]
    checkpoint_bytes: int
    num_kept: int
    critic_bytes: int
    num_evaluated: int
    gpu_bytes: int | None = None

    @staticmethod
    def of(tree: Mapping[str, Any]) -> Session:
        """Return the session that `dataclasses.asdict` made this tree of."""
        parts = [RunPart(**part) for part in tree["parts"]]
        return Session(**{**tree, "parts": parts})


@dataclass(frozen=True)
class Item:
    """What a run does `times` times, and the `seconds` that each takes."""

    name: str
    times: int
    seconds: float

    @property
    def total(self) -> float:
        return self.times * self.seconds


@dataclass(frozen=True)
class Forecast:
    """The parts of a whole run's time, and its responses and bytes."""

    items: list[Item]
    responses: dict[str, int]
    disk_written: int
    disk_held: int

    @property
    def seconds(self) -> float:
        return sum(item.total for item in self.items)


def forecast(config: FitConfig, sessions: Sequence[Session]) -> Forecast:
    """Predict a whole run of the config from what the sessions of a smoke test measured.

    An iteration counts as long as the mean of those measured in its phase. The time between the
    stages of an iteration is counted with them.
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
    """The iterations after which a run saves a checkpoint, at most: each evaluated policy has the
    best score so far."""
    numbers, every = resolve(config), config.checkpoints.every_n_iterations
    pretraining = numbers.value_pretraining_iterations if config.algorithm.has_critic else 0
    last = pretraining + config.training.num_iterations
    best = {pretraining + number for number in evaluated_iterations(config)}
    return sorted({*range(every, last + 1, every), last, *best})


def num_due(num_iterations: int, every_n: int | None) -> int:
    """How often something is due in a phase: at its first and last iteration, and every n-th."""
    numbers = range(1, num_iterations + 1)
    return sum(is_first_last_or_nth(n, every_n, is_last=n == num_iterations) for n in numbers)


def separate_stages(config: FitConfig) -> tuple[str, ...]:
    """The stages that are not of each iteration, and are counted by themselves."""
    stages = (*_OTHER_TIMES, _VALUE_PAGE)
    is_of_each = config.algorithm.advantage_estimator == "vine"
    is_measured = config.value_truth.every_n_iterations is not None
    return (*stages, _CONTINUATIONS) if is_measured and not is_of_each else stages


def _without(part: RunPart, stages: Sequence[str]) -> list[float]:
    return [seconds for stage, seconds in part.seconds.items() if stage not in stages]


def _mean_of_stage(parts: Sequence[RunPart], stage: str) -> float:
    """The mean of the parts that have the stage; 0 if none has."""
    return fmean([part.seconds[stage] for part in parts if stage in part.seconds] or [0.0])


def session_file(folder: Path, last: int) -> Path:
    """The file into which the session up to iteration `last` writes its figures."""
    return folder / f"session_{last}.json"
