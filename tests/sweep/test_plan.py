"""Which processes a sweep needs: shared value pretraining, equal prompts, identities."""

from __future__ import annotations

import dataclasses
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.fits import ROOT
from tests.sweep.conftest import ablation, grid, plan
from vapo.config import FitConfig, resolve
from vapo.config.loading import from_yaml
from vapo.config.written import to_yaml
from vapo.errors import UserError
from vapo.sweep import identity
from vapo.sweep.plan import (
    PRETRAINING_SEED_OFFSET,
    Plan,
    Task,
    budget_differences,
    describe_size,
    make_plan,
    set_key,
)

VAPO = "{full_system: VAPO, rows: [{row: VAPO}]}"


@pytest.fixture(scope="module")
def of_ablation() -> Plan:
    """The shipped ablation's, with two seeds."""
    with chdir(ROOT):
        return plan(ablation(), seeds=[0, 1])


def task(planned: Plan, row: str, seed: int = 0) -> Task:
    return next(t for t in planned.tasks if t.identity == planned.assigned[row, seed])


def test_ablation_pretrains_once_for_group_sampling_and_once_without(of_ablation: Plan) -> None:
    planned = of_ablation
    first = [t for t in planned.tasks if t.is_pretraining]
    assert [t.name for t in first] == [
        "value pretraining of VAPO/0",
        "value pretraining of without group_sampling/0",
        "value pretraining of VAPO/1",
        "value pretraining of without group_sampling/1",
    ]
    assert len(planned.tasks) == 4 + 2 * 14
    needs = {row.name: task(planned, row.name).needs for row in planned.grid.rows}
    without = {"Vanilla PPO", "GRPO", "DAPO", "without value_pretraining"}
    without |= {row.name for row in planned.grid.rows if row.system == "without_critic"}
    assert {row for row, needed in needs.items() if needed is None} == without
    assert needs["without group_sampling"] == first[1].identity
    sharing = {row for row, needed in needs.items() if needed == first[0].identity}
    assert sharing == needs.keys() - without - {"without group_sampling"}


def test_each_task_comes_after_what_it_needs(of_ablation: Plan) -> None:
    seen: set[str | None] = {None}
    for one in of_ablation.tasks:
        assert one.needs in seen
        seen.add(one.identity)


def test_every_row_begins_the_policy_phase_at_iteration_0(of_ablation: Plan) -> None:
    """So iteration i has the same prompts in every row, with value pretraining or without."""
    for one in of_ablation.tasks:
        numbers = resolve(one.config)
        if one.is_pretraining:
            assert one.config.training.num_iterations == 0
            assert numbers.value_pretraining_iterations == 12
            assert one.config.seed == PRETRAINING_SEED_OFFSET + one.seed
        else:
            assert not resolve(one.config).value_pretraining_iterations
            assert one.config.seed == one.seed
            assert one.config.training.num_iterations == 40
            assert numbers.num_prompts * numbers.group_size == 256


def test_the_component_stays_on_in_rows_that_start_from_the_critic(of_ablation: Plan) -> None:
    planned = of_ablation
    assert "enabled=True" in repr(task(planned, "VAPO").config.components.value_pretraining)
    off = task(planned, "without value_pretraining").config
    assert "enabled=False" in repr(off.components.value_pretraining)
    assert off.critic.init == "reward_model"
    assert task(planned, "VAPO").config.critic.init == f"pretraining {task(planned, 'VAPO').needs}"


def test_a_row_keeps_the_head_that_its_value_pretraining_has_trained(tmp_path: Path) -> None:
    rows = grid(tmp_path, "{full_system: VAPO, rows: [{row: VAPO}]}")
    first, own = plan(rows, "critic.head.kind=bounded", "critic.head.start=first_batch").tasks
    assert (first.is_pretraining, first.config.critic.head.start) == (True, "first_batch")
    assert (own.config.critic.head.kind, own.config.critic.head.start) == ("bounded", "as_loaded")


@pytest.mark.slow
def test_every_value_pretraining_is_a_config_that_a_run_accepts(tmp_path: Path) -> None:
    """What has no influence is the base's, and must not contradict what stays the row's."""
    presets = sorted((ROOT / "conf/algorithm").glob("*.yaml"))
    rows = [f"{{row: {p.stem}, configs: [{p}]}}" for p in presets]
    off = "components.clip_higher.enabled: false, components.token_level_loss.enabled: false"
    for surrogate in ("gspo", "cispo"):  # with a critic, which their presets have none of
        own = f"{{algorithm.surrogate: {surrogate}, {off}}}"
        rows.append(f"{{row: VAPO with {surrogate}, overrides: {own}}}")
    planned = plan(grid(tmp_path, f"{{rows: [{', '.join(rows)}]}}"))
    first = [t for t in planned.tasks if t.is_pretraining]
    assert len(first) >= 8
    assert {"gspo", "cispo"} <= {one.config.algorithm.surrogate for one in first}
    for one in first:
        written = to_yaml(one.config)
        assert to_yaml(from_yaml(FitConfig, written, source=one.name)) == written


DEPENDENCE: list[tuple[str, object, bool]] = [
    ("algorithm.lambda_policy", 0.5, True),
    ("algorithm.kl.coef", 0.1, True),
    ("algorithm.baseline.kind", "trusted", True),
    ("actor.optimizer.lr", 1e-5, True),
    ("training.num_iterations", 7, True),
    ("evaluation.k", 3, True),
    ("components.token_level_loss.enabled", "false", True),
    ("algorithm.gamma", 0.9, False),
    ("critic.value_clip", 0.2, False),
    ("critic.optimizer.lr", 1e-4, False),
    ("rollouts.temperature", 0.9, False),
    ("rewards.incorrect", 0.0, False),
    ("data.max_prompt_tokens", 39, False),
    ("training.minibatch_size", 32, False),
    ("components.value_pretraining.num_iterations", 6, False),
    ("components.group_sampling.enabled", "false", False),
    ("trainer.precision", "bf16-mixed", False),
]


@pytest.fixture(scope="module")
def of_single_keys(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A row for each of them, which it is named after."""
    rows = [f"{{row: {key}, overrides: {{{key}: {value}}}}}" for key, value, _ in DEPENDENCE]
    text = f"{{full_system: VAPO, rows: [{{row: VAPO}}, {', '.join(rows)}]}}"
    with chdir(ROOT):
        return plan(grid(tmp_path_factory.mktemp("keys"), text))


@pytest.mark.parametrize(("key", "value", "shared"), DEPENDENCE)
def test_what_the_pretrained_critic_depends_on(
    of_single_keys: Plan, key: str, value: object, shared: bool
) -> None:
    full, own = (task(of_single_keys, row).needs for row in ("VAPO", key))
    assert full is not None
    assert own is not None
    assert (own == full) == shared


def test_a_critic_with_a_head_of_ones_own_cannot_be_handed_on(tmp_path: Path) -> None:
    own = ("critic.init=policy", "critic.head_function=mine:make_head")
    rows = grid(tmp_path, "{full_system: VAPO, rows: [{row: VAPO}]}")
    with pytest.raises(UserError, match="row 'VAPO': a sweep hands a pretrained critic on"):
        plan(rows, *own)
    assert len(plan(rows, *own, "components.value_pretraining.enabled=false").tasks) == 1


def test_identity_is_of_values_code_and_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plan(grid(tmp_path, VAPO)).base
    assert isinstance(config, FitConfig)
    same = replace(config, output_dir="elsewhere")
    same = set_key(same, "trainer.num_threads", 7)
    same = set_key(same, "tracking.tags", {"a": "b"})
    assert identity.task_identity(same) == identity.task_identity(config)
    assert identity.task_identity(replace(config, seed=1)) != identity.task_identity(config)
    before = identity.task_identity(config)
    monkeypatch.setattr(identity, "fingerprint", lambda folder: f"rewritten {folder}")
    assert identity.task_identity(config) != before
    monkeypatch.undo()
    monkeypatch.setattr(identity, "code_version", lambda: "0.1.0+other")
    assert identity.task_identity(config) != before


def test_code_version_follows_what_a_training_process_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = ("module.py", "studies/critics/comparison.py", "studies/short_trainer.py")
    others = ("sweep/plan.py", "sweep/report/table.py", "studies/gates/measuring.py", "cli.py")
    for name in (*loaded, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a = 1\n")
    monkeypatch.setattr(identity, "_PACKAGE", tmp_path)

    def version() -> str:
        identity.code_version.cache_clear()
        return identity.code_version()

    first = version()
    for name in others:
        (tmp_path / name).write_text("a = 2\n")
    assert version() == first
    for name in loaded:
        before = version()
        (tmp_path / name).write_text("a = 2\n")
        assert version() != before, name


def test_two_rows_of_one_config_are_one_run(tmp_path: Path) -> None:
    planned = plan(grid(tmp_path, "rows: [{row: a}, {product: {algorithm.gamma: [1.0]}}]"))
    assert len(planned.tasks) == 2  # one value pretraining, one run
    assert describe_size(planned) == (
        "sweep grid: 2 rows, seed 0: 1 run and 1 value pretraining, each a process of its own"
    )
    assert planned.assigned["a", 0] == planned.assigned["gamma 1.0", 0]


@pytest.mark.parametrize(
    ("rows", "overrides", "said"),
    [
        ("rows: [{row: a}]", ["seed=5"], "^seed has no effect in a sweep: leave it out, and name"),
        ("rows: [{row: a}, {product: {seed: [1, 2]}}]", [], "^row 'seed 1' of the grid: seed has"),
    ],
)
def test_a_seed_of_ones_own_is_refused(
    tmp_path: Path, rows: str, overrides: list[str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        make_plan(grid(tmp_path, rows), [ROOT / "conf/vapo.yaml"], overrides, [0])


def test_other_budgets_are_told(of_ablation: Plan, tmp_path: Path) -> None:
    assert list(budget_differences(of_ablation)) == []
    text = "rows: [{row: a}, {product: {components.group_sampling.group_size: [4]}}]"
    assert list(budget_differences(plan(grid(tmp_path, text)))) == [
        "group_size 4: 128 responses (not 256)"
    ]


def test_set_key_copies(tmp_path: Path) -> None:
    config = plan(grid(tmp_path, VAPO)).base
    changed = set_key(config, "algorithm.kl.coef", 0.5)
    assert (config.algorithm.kl.coef, changed.algorithm.kl.coef) == (0.0, 0.5)
    assert dataclasses.asdict(set_key(changed, "algorithm.kl.coef", 0.0)) == dataclasses.asdict(
        config
    )
