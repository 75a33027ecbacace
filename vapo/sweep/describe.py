"""A plan in words: for `--dry_run`, and as the description of the parent run."""

from __future__ import annotations

from vapo.config import FitConfig
from vapo.config.written import Scalar
from vapo.sweep.identity import code_version
from vapo.sweep.plan import Plan, budget_differences, differences, num_rollouts


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
