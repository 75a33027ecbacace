"""A plan in words, for `--dry_run` and the parent run, and what it may cost: the tokens of its
config, the times of earlier runs.

Seconds are only those that runs in the sweep's folder took; none are computed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from vapo.config import FitConfig, resolve
from vapo.config.continuation_rules import most_continuations
from vapo.config.data import sources_of
from vapo.config.written import Scalar
from vapo.sweep.folders import TaskFolder
from vapo.sweep.identity import code_version
from vapo.sweep.plan import Plan, Task, budget_differences, differences, num_rollouts
from vapo.system.progress import format_seconds


def describe_differences(config: FitConfig, base: FitConfig) -> list[str]:
    """`key: base's value -> its value`, one line for each key."""
    return [
        f"{key}: {_show(before)} -> {_show(after)}"
        for key, (before, after) in differences(config, base).items()
    ]


def describe_size(plan: Plan) -> str:
    first = sum(task.is_pretraining for task in plan.tasks)
    seeds = ", ".join(map(str, plan.seeds))
    return (
        f"sweep {plan.grid.name}: {_count(len(plan.grid.rows), 'row')}, "
        f"seed{'s' * (len(plan.seeds) > 1)} {seeds}: {_count(len(plan.tasks) - first, 'run')} and "
        f"{_count(first, 'value pretraining')}, each a process of its own"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def describe_plan(plan: Plan, command: str) -> str:
    """Markdown: what is run, with which budget, and what each row changes."""
    reference = plan.row_configs[plan.grid.full_system or plan.grid.rows[0].name]
    lines = [
        plan.grid.description or f"Sweep {plan.grid.name}.",
        "",
        f"- {describe_size(plan)}",
        f"- each run: {reference.training.num_iterations} policy iterations of "
        f"{num_rollouts(reference)} responses, {reference.training.minibatch_size} responses an "
        f"optimizer step, at most {reference.rollouts.max_response_tokens} response tokens",
        f"- actor `{reference.actor.path}`, critic from `{reference.critic.init}`",
        f"- code {code_version()}",
        f"- command: `{command}`",
        *(f"- value pretraining shared by: {', '.join(rows)}" for rows in plan.shares().values()),
        *(f"- other budget: {line}" for line in budget_differences(plan)),
        "",
        "Rows, and what each changes in the base config:",
        "",
    ]
    for row in plan.grid.rows:
        changes = describe_differences(plan.row_configs[row.name], plan.base)
        mark = " (full system)" if row.name == plan.grid.full_system else ""
        lines += [f"- **{row.name}**{mark}", *(f"    - {line}" for line in changes or ["nothing"])]
    return "\n".join(lines)


def _show(value: Scalar) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def describe_budget(plan: Plan, sweep_dir: Path) -> list[str]:
    """The dry run's last lines: tokens at most, what has finished, how long such runs took."""
    left = [task for task in plan.tasks if TaskFolder(sweep_dir, task).finished() is None]
    lines = ["At most, if every response is as long as it may be, the sampled tokens are:"]
    for name, firsts in (("value pretraining", True), ("run", False)):
        tasks = [task for task in plan.tasks if task.is_pretraining == firsts]
        if tasks:
            lines.append(f"- {_count(len(tasks), name)}: {_describe_tokens(tasks)}")
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


def describe_times(plan: Plan, sweep_dir: Path) -> list[str]:
    """A line for each row and value pretraining of the plan with runs that have finished here."""
    recorded = list(_recorded(plan, sweep_dir))
    lines = []
    for name in dict.fromkeys(map(_without_seed, (task.name for task in plan.tasks))):
        found = [(seconds, is_planned) for of, seconds, is_planned in recorded if of == name]
        if not found:
            continue
        took = " to ".join(dict.fromkeys(format_seconds(end(found)[0]) for end in (min, max)))
        others = sum(not is_planned for _, is_planned in found)
        note = f" ({others} of another seed, config or code)" if others else ""
        lines.append(f"- {name}: {len(found)} finished, took {took}{note}")
    return ["", "How long it took before, in this folder:", *lines] if lines else []


def _recorded(plan: Plan, sweep_dir: Path) -> Iterator[tuple[str, float, bool]]:
    """Of each run that has finished its row or value pretraining, its seconds, if it is planned.

    Runs that resumed are left out: what is recorded is the time of their last part.
    """
    planned = {task.identity: task for task in plan.tasks}
    for path in sorted(sweep_dir.glob("runs/*/status.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            status = json.loads(path.read_text())
            outcome, task = status["outcome"], planned.get(status["identity"])
            if outcome["state"] == "finished" and not outcome.get("was_resumed", False):
                name = status["name"] if task is None else task.name
                yield _without_seed(name), float(outcome["seconds"]), task is not None


def _without_seed(name: str) -> str:
    return name.rpartition("/")[0]
