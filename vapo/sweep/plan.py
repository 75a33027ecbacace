"""Plans what a sweep runs: every row with every seed, and the value pretrainings that they share.

**Sharing.** Rows whose pretrained critics would be the same start from one critic. The critic
depends on every config key except those in `_NO_INFLUENCE`, which provably do not reach value
pretraining: there the policy is fixed, the targets are Monte-Carlo returns, and only the critic
is updated. A key that is missing from the list counts as an influence, which costs a pretraining
but never gives a row the wrong critic. Group sampling is an influence: it decides which prompts
the critic sees, so `without group_sampling` has a pretraining for itself.

**Equal prompts.** Value pretraining is a run of its own (`training.num_iterations=0`). The rows
then have `critic.init=<its critic>` and no iterations of it, so that the policy phase of every
row, with or without value pretraining, begins at iteration 0 and sees the same prompts.

**Fresh rollouts.** Iteration 0 of a row would sample, from the same policy with the same seed,
the very responses that the critic was pretrained on. So a pretraining's seed is the row's plus
`PRETRAINING_SEED_OFFSET`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vapo.config import FitConfig, resolve
from vapo.config.algorithm import BaselineConfig
from vapo.config.critic import as_loaded
from vapo.config.extends import read_files
from vapo.config.loading import compose_layers
from vapo.config.options import describe
from vapo.config.other_models import check_learning_rates
from vapo.config.overrides import read_overrides
from vapo.config.rules import value_at
from vapo.config.sources import Change, is_under
from vapo.config.written import flatten_written
from vapo.errors import UserError, about
from vapo.sweep.grid import Grid, GridRow, as_text
from vapo.sweep.identity import code_version, task_identity
from vapo.sweep.report.tables import markdown_text

PRETRAINING_SEED_OFFSET = 1_000_000
_NO_INFLUENCE = (
    "components.decoupled_gae", "components.length_adaptive_gae", "components.token_level_loss",
    "components.clip_higher", "components.positive_example_lm_loss", "algorithm.lambda_policy",
    "algorithm.eps_low", "algorithm.whiten_advantages", "algorithm.dual_clip",
    "algorithm.entropy_coef", "algorithm.kl", "algorithm.mismatch", "algorithm.sequence_reduction",
    "actor.optimizer", "actor.gradient_checkpointing", "training.num_iterations", "evaluation",
)  # fmt: skip
_CLIP = ("components.clip_higher",)
_RULED_BY_SURROGATE = {
    "gspo": (*_CLIP, "components.token_level_loss", "algorithm.sequence_reduction"),
    **dict.fromkeys(("cispo", "dis", "dppo_tv"), _CLIP),
}
# A fair comparison keeps these equal, and the number of responses of an iteration.
_BUDGET = ("training", "data", "rollouts", "evaluation", "actor.path")
_BOOKKEEPING = ("output_dir", "tracking", "seed", "trainer.num_threads")


@dataclass(frozen=True)
class Task:
    """A process of a sweep: the run of one row with one seed, or a value pretraining.

    Attributes:
        identity: a digest of its config and code (`task_identity`).
        needs: the identity of the value pretraining that must finish first; None if there is none.
    """

    row: GridRow
    seed: int
    config: FitConfig
    identity: str
    needs: str | None = None
    is_pretraining: bool = False

    @property
    def name(self) -> str:
        prefix = "value pretraining of " if self.is_pretraining else ""
        return f"{prefix}{self.row.name}/{self.seed}"


@dataclass(frozen=True)
class Plan:
    """The tasks of a sweep.

    Attributes:
        base: the base config, over which the rows are merged.
        row_configs: row -> its config as the user gave it.
        tasks: in the order of work. Each comes after the task that it needs.
        assigned: (row, seed) -> the identity of its task. Rows with equal configs share one task.
    """

    grid: Grid
    seeds: tuple[int, ...]
    base: FitConfig
    row_configs: dict[str, FitConfig]
    tasks: tuple[Task, ...]
    assigned: dict[tuple[str, int], str]

    def shares(self, seed: int) -> dict[str, list[str]]:
        """Return the identity of each value pretraining of a seed -> the rows that use its
        critic.
        """
        rows: dict[str, list[str]] = {}
        needs = {task.identity: task.needs for task in self.tasks}
        for row in self.grid.rows:
            if (pretraining := needs[self.assigned[row.name, seed]]) is not None:
                rows.setdefault(pretraining, []).append(row.name)
        return rows


def make_plan(
    grid: Grid, files: Sequence[Path], overrides: Sequence[str], seeds: Sequence[int]
) -> Plan:
    """Compose every row's config, and plan the runs and the value pretrainings that rows can share.

    Args:
        files, overrides: the base config.

    Raises: UserError: a config is wrong. For a row's config the error names the row.
    """
    base, row_configs = compose_rows(grid, files, overrides)
    assigned: dict[tuple[str, int], str] = {}
    tasks: dict[str, Task] = {}
    for seed in seeds:
        row_tasks = [_tasks_of(row, row_configs[row.name], base, seed) for row in grid.rows]
        firsts = [pretraining for pretraining, _ in row_tasks if pretraining is not None]
        for first in sorted(firsts, key=lambda task: task.row.name != grid.full_system):
            tasks.setdefault(first.identity, first)  # has the full system's name if it shares it
        for row, (_, task) in zip(grid.rows, row_tasks, strict=True):
            tasks.setdefault(task.identity, task)
            assigned[row.name, seed] = task.identity
    return Plan(grid, tuple(seeds), base, row_configs, tuple(tasks.values()), assigned)


def compose_rows(
    grid: Grid, files: Sequence[Path], overrides: Sequence[str]
) -> tuple[FitConfig, dict[str, FitConfig]]:
    """Return the base config (files, then overrides), and row -> its config, merged over the base.

    Raises: UserError: a config is wrong. For a row's config the error names the row.
    """
    for texts, place in ((overrides, ""), *((row.overrides, row.name) for row in grid.rows)):
        if any(text.partition("=")[0].strip() == "seed" for text in texts):
            where = f"row '{place}' of the grid: " if place else ""
            raise UserError(
                f"{where}seed has no effect in a sweep: leave it out, and name the seeds with "
                "--seeds"
            )
    entries = describe(FitConfig)
    layers = [*read_files(files), read_overrides(overrides, entries)]
    base = compose_layers(FitConfig, layers).config
    row_configs = {}
    for row in grid.rows:
        with about(f"row '{row.name}' of the grid"):
            files_of_row = read_files(row.configs, below=layers)
            row_layers = [*files_of_row, read_overrides(row.overrides, entries, folder=row.folder)]
            composed = compose_layers(FitConfig, [*layers, *row_layers])
            check_learning_rates(composed.config)
            row_configs[row.name] = composed.config
    return base, row_configs


def _tasks_of(
    row: GridRow, config: FitConfig, base: FitConfig, seed: int
) -> tuple[Task | None, Task]:
    """Return the tasks of a row and a seed: its value pretraining or None, and its run.

    Raises: UserError: the row pretrains a critic whose value head is a user's function, which the
        critic's folder cannot hold.
    """
    config = replace(config, seed=seed)
    if not resolve(config).value_pretraining_iterations:
        return None, Task(row, seed, config, task_identity(config))
    if config.critic.head_function is not None:
        raise UserError(
            f"row '{row.name}': a sweep hands a pretrained critic on as a model folder, which has "
            "no place for critic.head_function: set critic.head_function=null, or "
            "components.value_pretraining.enabled=false"
        )
    needs = task_identity(pretraining_config(config, FitConfig()))
    first = pretraining_config(config, base)
    pretraining = Task(row, seed, first, needs, is_pretraining=True)
    config = start_from_critic(config, f"pretraining {needs}")
    return pretraining, Task(row, seed, config, task_identity(config), needs)


def pretraining_config(config: FitConfig, other: FitConfig) -> FitConfig:
    """Return the config of the run that only pretrains the critic of `config`.

    It has no policy iterations and a seed of its own, which depends on the config's.

    Args:
        other: the config whose values replace the keys that have no influence on value pretraining.
            This is the base config for the run itself. For the run's identity it is the schema's
            defaults, so that a critic is found again whatever else the base config changes.
    """
    for key in _NO_INFLUENCE:
        if key in _RULED_BY_SURROGATE.get(config.algorithm.surrogate, ()):
            continue  # the row's surrogate stays, and may not go with another value
        config = set_key(config, key, value_at(other, key))
        sources = config.from_environment.taking(key, other.from_environment)
        config = replace(config, from_environment=sources)
    # Values are only mixed for the policy. Some mixtures need groups, which a row may not have.
    config = set_key(config, "algorithm.baseline", BaselineConfig())
    config = set_key(config, "training.num_iterations", 0)
    return replace(config, seed=config.seed + PRETRAINING_SEED_OFFSET)


def start_from_critic(config: FitConfig, critic: str) -> FitConfig:
    """Return the config of a row's run that starts from a pretrained critic.

    Value pretraining stays on, with 0 iterations. The run starts with the trained value head,
    whatever `critic.head.start` says of a new one.

    Args:
        critic: the path of the critic's folder.
    """
    config = set_key(config, "critic.init", critic)
    if config.critic.head.start != "as_loaded":
        config = set_key(config, "critic.head", as_loaded(config.critic.head))
    return set_key(config, "components.value_pretraining.num_iterations", 0)


def set_key(config: Any, key: str, value: Any) -> Any:
    """Return a copy of a config with another value, or another block, at a dotted key."""
    name, _, rest = key.partition(".")
    return replace(config, **{name: set_key(getattr(config, name), rest, value) if rest else value})


def differences(config: FitConfig, base: FitConfig) -> list[Change]:
    """Return the keys whose written values differ between two configs, without bookkeeping keys."""
    base_values, values = flatten_written(base), flatten_written(config)
    return [
        Change(key, as_text(base_values.get(key)), as_text(values.get(key)))
        for key in base_values | values
        if base_values.get(key) != values.get(key) and not is_under(key, _BOOKKEEPING)
    ]


def budget_differences(plan: Plan) -> Iterator[str]:
    """Yield a line for each row whose budget is not the full system's (or the first row's).

    The budget is what a fair comparison keeps equal: data, rollouts, training and evaluation.
    """
    expected = plan.row_configs[plan.grid.full_system or plan.grid.rows[0].name]
    for name, config in plan.row_configs.items():
        changes = [
            f"{change.key} {change.after} (not {change.earlier})"
            for change in differences(config, expected)
            if is_under(change.key, _BUDGET)
        ]
        num_responses, expected_responses = (
            resolve(config).num_responses,
            resolve(expected).num_responses,
        )
        if num_responses != expected_responses:
            changes.append(f"{num_responses} responses (not {expected_responses})")
        if changes:
            yield f"{name}: {', '.join(changes)}"


def describe_size(plan: Plan) -> str:
    num_pretrainings = sum(task.is_pretraining for task in plan.tasks)
    seeds = f"seed{'s' * (len(plan.seeds) > 1)} {', '.join(map(str, plan.seeds))}"
    num_runs = len(plan.tasks) - num_pretrainings
    runs = f"{_count(num_runs, 'run')} and {_count(num_pretrainings, 'value pretraining')}"
    rows = _count(len(plan.grid.rows), "row")
    return f"sweep {plan.grid.name}: {rows}, {seeds}: {runs}, each a process of its own"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def describe_plan(plan: Plan, command: str) -> str:
    """Return a Markdown text on what is run, with which budget, and what each row changes."""
    reference = plan.row_configs[plan.grid.full_system or plan.grid.rows[0].name]
    shares = plan.shares(plan.seeds[0])
    lines = [
        plan.grid.description or f"Sweep {plan.grid.name}.",
        "",
        f"- {describe_size(plan)}",
        f"- each run: {reference.training.num_iterations} policy iterations of "
        f"{resolve(reference).num_responses} responses, {reference.training.minibatch_size} "
        "responses an optimizer step, "
        f"at most {reference.rollouts.max_response_tokens} response tokens",
        f"- actor `{reference.actor.path}`, critic from `{reference.critic.init}`",
        f"- code {code_version()}",
        f"- command: `{command}`",
        *(
            f"- value pretraining shared by: {markdown_text(', '.join(rows))}"
            for rows in shares.values()
        ),
        *(f"- other budget: {line}" for line in budget_differences(plan)),
        "",
        "Rows, and what each changes in the base config:",
        "",
    ]
    for row in plan.grid.rows:
        changes = [*map(str, differences(plan.row_configs[row.name], plan.base))]
        mark = " (full system)" if row.name == plan.grid.full_system else ""
        lines += [
            f"- **{markdown_text(row.name)}**{mark}",
            *(f"    - {line}" for line in changes or ["nothing"]),
        ]
    return "\n".join(lines)
