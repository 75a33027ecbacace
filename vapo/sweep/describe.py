"""A plan in words, for `--dry_run` and the parent run, and what it may cost: the tokens of its
config, and the seconds that its runs in the sweep's folder took.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vapo.config import FitConfig, resolve
from vapo.config.continuation_rules import most_continuations
from vapo.config.data import sources_of
from vapo.sweep.folders import TaskFolder
from vapo.sweep.grid import as_text
from vapo.sweep.identity import code_version
from vapo.sweep.plan import Plan, Task, budget_differences, differences, num_rollouts
from vapo.system.progress_display import format_seconds


def describe_differences(config: FitConfig, base: FitConfig) -> list[str]:
    """`key: base's value -> its value`, one line for each key."""
    return [
        f"{key}: {as_text(before)} -> {as_text(after)}"
        for key, (before, after) in differences(config, base).items()
    ]


def describe_size(plan: Plan) -> str:
    first = sum(task.is_pretraining for task in plan.tasks)
    seeds = f"seed{'s' * (len(plan.seeds) > 1)} {', '.join(map(str, plan.seeds))}"
    runs = f"{_count(len(plan.tasks) - first, 'run')} and {_count(first, 'value pretraining')}"
    rows = _count(len(plan.grid.rows), "row")
    return f"sweep {plan.grid.name}: {rows}, {seeds}: {runs}, each a process of its own"


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


def describe_budget(plan: Plan, sweep_dir: Path) -> list[str]:
    """The dry run's last lines: tokens at most, what has finished, how long that took."""
    outcomes = {task.identity: TaskFolder(sweep_dir, task).finished() for task in plan.tasks}
    left = [task for task in plan.tasks if outcomes[task.identity] is None]
    lines = ["At most, if every response is as long as it may be, the sampled tokens are:"]
    for name, firsts in (("value pretraining", True), ("run", False)):
        tasks = [task for task in plan.tasks if task.is_pretraining == firsts]
        if tasks:
            lines.append(f"- {_count(len(tasks), name)}: {_describe_tokens(tasks)}")
    if len(left) < len(plan.tasks) and left:
        lines.append(f"- of these not finished, {len(left)}: {_describe_tokens(left)}")
    configs = [task.config for task in plan.tasks]
    if any(evaluation_tokens(config) is None for config in configs):
        lines.append(
            "- not counted: evaluations on a held-out file of unknown length (no num_examples)"
        )
    if any(config.value_truth.every_n_iterations is not None for config in configs):
        lines.append("- not counted: what value_truth.every_n_iterations samples")
    done = len(plan.tasks) - len(left)
    lines += ["", f"{done} of {len(plan.tasks)} processes have finished already in {sweep_dir}"]
    took: dict[str, list[float]] = {}
    for task in plan.tasks:
        outcome = outcomes[task.identity]
        if outcome and not outcome.was_resumed:  # else its seconds are of its last part
            took.setdefault(task.name.rpartition("/")[0], []).append(outcome.seconds)
    if took:
        lines += ["", "How long it took before, in this folder:"]
    for name, seconds in took.items():
        ends = dict.fromkeys(map(format_seconds, (min(seconds), max(seconds))))
        lines.append(f"- {name}: {len(seconds)} finished, took {' to '.join(ends)}")
    return lines


def _describe_tokens(tasks: Sequence[Task]) -> str:
    training = sum(training_tokens(task.config) for task in tasks)
    evaluation = sum(evaluation_tokens(task.config) or 0 for task in tasks)
    return f"{training:,} to train on, {evaluation:,} in evaluations"


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
    data, most = config.data, config.evaluation.num_prompts
    if data.heldout is None:  # at least one of each source is split off
        known: list[int | None] = [data.heldout_size, len(sources_of(data, "train")) - 1]
    else:
        known = [source.num_examples for source in sources_of(data, "heldout").values()]
    if None not in known:
        found = sum(filter(None, known))
        most = found if most is None else min(found, most)
    every, iterations = config.evaluation.every_n_iterations, config.training.num_iterations
    times = 1 + -(-iterations // every)  # before the first, at every n-th and after the last
    length = config.evaluation.max_response_tokens or config.rollouts.max_response_tokens
    return None if most is None else times * most * config.evaluation.k * length
