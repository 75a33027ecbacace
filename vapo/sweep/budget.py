"""What a sweep may cost, before it is begun: the tokens of its config, the times of earlier runs.

Seconds are only those that runs in the sweep's folder took; none are computed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vapo.config import FitConfig, resolve
from vapo.config.continuation_rules import most_continuations
from vapo.config.data import sources_of
from vapo.sweep.folders import TaskFolder
from vapo.sweep.plan import Plan, Task, num_rollouts
from vapo.system.progress_display import format_seconds


def describe_budget(plan: Plan, sweep_dir: Path) -> list[str]:
    """The dry run's last lines: tokens at most, what has finished, how long such runs took."""
    left = [task for task in plan.tasks if TaskFolder(sweep_dir, task).finished() is None]
    lines = ["At most, if every response is as long as it may be, the sampled tokens are:"]
    for name, firsts in (("value pretraining", True), ("run", False)):
        tasks = [task for task in plan.tasks if task.is_pretraining == firsts]
        if tasks:
            plural = "s" * (len(tasks) > 1)
            lines.append(f"- {len(tasks)} {name}{plural}: {_describe_tokens(tasks)}")
    if len(left) < len(plan.tasks) and left:
        lines.append(f"- of these not finished, {len(left)}: {_describe_tokens(left)}")
    lines += _not_counted(plan)
    lines += ["", f"{len(plan.tasks) - len(left)} of {len(plan.tasks)} processes have finished "
              f"already in {sweep_dir}"]  # fmt: skip
    return [*lines, *describe_times(plan, sweep_dir)]


def _describe_tokens(tasks: Sequence[Task]) -> str:
    training = sum(training_tokens(task.config) for task in tasks)
    evaluation = sum(evaluation_tokens(task.config) or 0 for task in tasks)
    return f"{training:,} to train on, {evaluation:,} in evaluations"


def _not_counted(plan: Plan) -> Iterator[str]:
    configs = [task.config for task in plan.tasks]
    if any(evaluation_tokens(config) is None for config in configs):
        yield "- not counted: evaluations on a held-out file of unknown length (no num_examples)"
    if any(config.value_truth.every_n_iterations is not None for config in configs):
        yield "- not counted: what value_truth.every_n_iterations samples"


def training_tokens(config: FitConfig) -> int:
    """The most tokens that all iterations of a run sample.

    Every attempt of dynamic sampling, the greedy response to each prompt that an estimator
    compares with, and the continuations of estimator vine are counted.
    """
    numbers, length = resolve(config), config.rollouts.max_response_tokens
    greedy = numbers.num_prompts if config.algorithm.needs_greedy_baseline else 0
    own = num_rollouts(config)
    attempts = max(1, config.algorithm.dynamic_sampling_attempts)
    continued = most_continuations(config)
    policy = (own * attempts + greedy) * length + (continued.num_tokens if continued else 0)
    pretraining = 0
    if config.algorithm.has_critic and config.components.value_pretraining.data is None:
        pretraining = numbers.value_pretraining_iterations * (own + greedy) * length
    return pretraining + config.training.num_iterations * policy


def evaluation_tokens(config: FitConfig) -> int | None:
    """The most tokens that a run's evaluations sample; None where their prompts are not known."""
    every, iterations = config.evaluation.every_n_iterations, config.training.num_iterations
    times = 1 + -(-iterations // every)  # before the first, at every n-th and after the last
    prompts = _most_heldout(config)
    length = config.evaluation.max_response_tokens or config.rollouts.max_response_tokens
    return None if prompts is None else times * prompts * config.evaluation.k * length


def _most_heldout(config: FitConfig) -> int | None:
    """Held-out prompts at most, as far as the config says; of a file it may not."""
    data, wanted = config.data, config.evaluation.num_prompts
    if data.heldout is None:  # at least one of each source is split off
        found = data.heldout_size + len(sources_of(data, "train")) - 1
    else:
        numbers = [source.num_examples for source in sources_of(data, "heldout").values()]
        if any(number is None for number in numbers):
            return wanted
        found = sum(filter(None, numbers))
    return found if wanted is None else min(found, wanted)


@dataclass(frozen=True)
class Recorded:
    """A run that has finished in this folder; `of`: its row, or the value pretraining's name."""

    of: str
    seconds: float
    is_planned: bool


def describe_times(plan: Plan, sweep_dir: Path) -> list[str]:
    """A line for each row and value pretraining of the plan with runs that have finished here."""
    recorded = list(_recorded(plan, sweep_dir))
    lines = []
    for name in dict.fromkeys(map(_without_seed, (task.name for task in plan.tasks))):
        found = [one for one in recorded if one.of == name]
        if not found:
            continue
        least, most = (limit(one.seconds for one in found) for limit in (min, max))
        took = format_seconds(least)
        if format_seconds(most) != took:
            took += f" to {format_seconds(most)}"
        others = sum(not one.is_planned for one in found)
        note = f" ({others} of another seed, config or code)" if others else ""
        lines.append(f"- {name}: {len(found)} finished, took {took}{note}")
    return ["", "How long it took before, in this folder:", *lines] if lines else []


def _recorded(plan: Plan, sweep_dir: Path) -> Iterator[Recorded]:
    """Runs that resumed are left out: what is recorded is the time of their last part."""
    planned = {task.identity: task for task in plan.tasks}
    for path in sorted(sweep_dir.glob("runs/*/status.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            status = json.loads(path.read_text())
            outcome, task = status["outcome"], planned.get(status["identity"])
            if outcome["state"] == "finished" and not outcome.get("was_resumed", False):
                name = status["name"] if task is None else task.name
                yield Recorded(_without_seed(name), float(outcome["seconds"]), task is not None)


def _without_seed(name: str) -> str:
    return name.rpartition("/")[0]
