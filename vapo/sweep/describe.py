"""A plan in words, for `--dry_run` and the parent run, and what of it has been run."""

from __future__ import annotations

from pathlib import Path

from vapo.config import FitConfig
from vapo.sweep.folders import TaskFolder
from vapo.sweep.grid import as_text
from vapo.sweep.identity import code_version
from vapo.sweep.plan import Plan, budget_differences, differences, num_rollouts
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


def describe_finished(plan: Plan, sweep_dir: Path) -> list[str]:
    """The dry run's last lines: what has finished already, and how long that took."""
    outcomes = {task.name: TaskFolder(sweep_dir, task).finished() for task in plan.tasks}
    finished = {name: outcome for name, outcome in outcomes.items() if outcome}
    took: dict[str, list[float]] = {}
    for name, outcome in finished.items():
        if not outcome.was_resumed:  # else its seconds are of its last part
            took.setdefault(name.rpartition("/")[0], []).append(outcome.seconds)
    lines = [f"{len(finished)} of {len(outcomes)} processes have finished already in {sweep_dir}"]
    if took:
        lines += ["", "How long it took before, in this folder:"]
    for name, seconds in took.items():
        ends = dict.fromkeys(map(format_seconds, (min(seconds), max(seconds))))
        lines.append(f"- {name}: {len(seconds)} finished, took {' to '.join(ends)}")
    return lines
