"""A plan in words: for `--dry_run`, and as the description of the parent run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vapo.config import FitConfig
from vapo.config.flattening import Scalar
from vapo.sweep.folders import TaskFolder
from vapo.sweep.identity import code_version
from vapo.sweep.plan import Plan, budget_differences, differences, num_rollouts

_MAX_NOTE = 5000  # MLflow bounds a tag; the table of the report goes below


def describe_differences(config: FitConfig, base: FitConfig) -> list[str]:
    """`key: base's value -> its value`, one line for each key."""
    return [
        f"{key}: {_show(before)} -> {_show(after)}"
        for key, (before, after) in differences(config, base).items()
    ]


def dry_run_lines(plan: Plan, sweep_dir: Path) -> Iterator[str]:
    """What would be run, and what of it is there already."""
    yield describe_size(plan)
    yield f"code {code_version()}; folder {sweep_dir}"
    yield ""
    for row in plan.grid.rows:
        yield row.name if row.name != plan.grid.full_system else f"{row.name}   (full system)"
        lines = describe_differences(plan.row_configs[row.name], plan.base)
        yield from (f"    {line}" for line in lines or ["the base config"])
    yield ""
    for number, rows in enumerate(plan.shares().values(), start=1):
        yield f"value pretraining {number} of each seed, shared by: {', '.join(rows)}"
    if lines := list(budget_differences(plan)):
        yield "budgets that differ:"
        yield from (f"    {line}" for line in lines)
    done = sum(TaskFolder(sweep_dir, task).finished() is not None for task in plan.tasks)
    yield f"{done} of {len(plan.tasks)} processes have finished already"


def describe_size(plan: Plan) -> str:
    first = sum(task.is_pretraining for task in plan.tasks)
    seeds = ", ".join(map(str, plan.seeds))
    return (
        f"sweep {plan.grid.name}: {len(plan.grid.rows)} rows, seed{'s' * (len(plan.seeds) > 1)} "
        f"{seeds}: {len(plan.tasks) - first} runs and {first} value pretrainings, "
        "each a process of its own"
    )


def describe_plan(plan: Plan, command: str) -> str:
    """Markdown for MLflow: what was run, with which budget, and what each row changes."""
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
        "| row | differs from the base |",
        "|---|---|",
    ]
    for row in plan.grid.rows:
        changes = describe_differences(plan.row_configs[row.name], plan.base)
        lines.append(f"| {row.name} | {'<br>'.join(changes) or 'nothing'} |")
    text = "\n".join(lines)
    return text if len(text) <= _MAX_NOTE else text[: _MAX_NOTE - 4] + "\n..."


def _show(value: Scalar) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
