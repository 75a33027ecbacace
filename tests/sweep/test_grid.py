"""Grid files to rows: the shipped ones, each kind of entry, and errors."""

from __future__ import annotations

import dataclasses
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.config.fits import ROOT, STATE_TRACKING
from tests.sweep.conftest import ablation, grid, plan
from vapo.config import Components, FitConfig, resolve
from vapo.config.loading import load_config
from vapo.errors import UserError
from vapo.sweep import grid as grid_module
from vapo.sweep.grid import choose_rows, read_grid
from vapo.sweep.plan import Plan, differences, make_plan, set_key

SHIPPED = sorted((ROOT / "conf/sweep").glob("*.yaml"))


def test_ablation_is_the_papers_table() -> None:
    rows = {row.name: row.paper_score for row in ablation().rows}
    assert rows == {
        "Vanilla PPO": 5,
        "GRPO": 47,
        "DAPO": 50,
        "without value_pretraining": 11,
        "without decoupled_gae": 33,
        "without length_adaptive_gae": 45,
        "without clip_higher": 46,
        "without token_level_loss": 53,
        "without positive_example_lm_loss": 54,
        "without group_sampling": 55,
        "without decoupled_gae, both lambdas 1": None,
        "VAPO without a critic": None,
        "VAPO without a critic, lambda by length": None,
        "VAPO": 60,
    }


@pytest.mark.parametrize(
    ("grid_file", "config"),
    [
        ("conf/sweep/ablation.yaml", "conf/vapo.yaml"),
        ("conf/sweep/ablation_missed_checks.yaml", "conf/missed_checks/vapo.yaml"),
        ("experiments/smollm2/grid.yaml", "conf/worked_sums/vapo.yaml"),
        ("conf/sweep/tug_of_war.yaml", "conf/tug_of_war/vapo.yaml"),
    ],
)
def test_vapo_without_a_critic_is_vapo_but_for_its_values(grid_file: str, config: str) -> None:
    """The same numbers in the loss; lambda 1, and with values of nothing that is trained VAPO's."""
    rows = choose_rows(read_grid(ROOT / grid_file), ["VAPO"])
    without = [row for row in read_grid(ROOT / grid_file).rows if row.system == "without_critic"]
    planned = make_plan(replace(rows, rows=(*rows.rows, *without)), [ROOT / config], [], [0])
    full = planned.row_configs["VAPO"]
    for row in without:
        found, is_by_length = planned.row_configs[row.name], "by length" in row.name
        assert not found.algorithm.has_critic
        ours, theirs = resolve(found), resolve(full)
        same = ("loss_reduction", "eps_low", "eps_high", "mu", "gamma", "num_prompts", "group_size")
        assert all(getattr(ours, key) == getattr(theirs, key) for key in same)
        assert (ours.alpha, ours.value_pretraining_iterations) == (
            theirs.alpha if is_by_length else None,
            0,
        )
        estimator = "milestones" if is_by_length else "leave_one_out"
        assert found.algorithm.advantage_estimator == estimator
        assert found.algorithm.whiten_advantages is full.algorithm.whiten_advantages
        assert found.rewards == full.rewards
    num = 1 if "tug_of_war" in grid_file else 2
    assert len(without) == num, "the numbers in a response are no milestones of an episode"


def test_every_component_has_its_row(tmp_path: Path) -> None:
    fields = [field.name for field in dataclasses.fields(Components)]
    rows = grid(tmp_path, "rows: [{without_components: true}]").rows
    assert [row.component_off for row in rows] == fields
    assert [row.overrides for row in rows] == [
        (f"components.{name}.enabled=false",) for name in fields
    ]


def test_an_eighth_component_is_in_every_ablation(monkeypatch: pytest.MonkeyPatch) -> None:
    eighth = dataclasses.make_dataclass(
        "Eight", [("ring_buffer", int, 0)], bases=(Components,), frozen=True
    )
    monkeypatch.setattr(grid_module, "Components", eighth)
    found = ablation()
    assert "without ring_buffer" in [row.name for row in found.rows]
    assert len(found.rows) == 15


@pytest.fixture(scope="module")
def of_ablation() -> Plan:
    """The shipped ablation's, with two seeds."""
    with chdir(ROOT):
        return plan(ablation(), seeds=[0, 1])


def test_each_row_switches_its_own_numbers_only(of_ablation: Plan) -> None:
    planned = of_ablation
    full = dataclasses.asdict(resolve(planned.row_configs["VAPO"]))
    changed = {
        row.component_off: {
            key
            for key, value in dataclasses.asdict(resolve(planned.row_configs[row.name])).items()
            if value != full[key]
        }
        for row in planned.grid.rows
        if row.name.startswith("without ") and "," not in row.name
    }
    assert changed == {
        "value_pretraining": {"value_pretraining_iterations"},
        "decoupled_gae": {"lambda_critic"},
        "length_adaptive_gae": {"alpha"},
        "token_level_loss": {"loss_reduction"},
        "clip_higher": {"eps_high"},
        "positive_example_lm_loss": {"mu"},
        "group_sampling": {"num_prompts", "group_size"},
    }
    second = resolve(planned.row_configs["without decoupled_gae, both lambdas 1"])
    assert (second.lambda_critic, second.alpha, second.lambda_policy) == (None, None, 1.0)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem == "ablation" else pytest.mark.slow)
        for path in SHIPPED
    ],
)
def test_shipped_grids_resolve(path: Path, of_ablation: Plan) -> None:
    planned = of_ablation if path.stem == "ablation" else plan(read_grid(path), seeds=[0, 1])
    assert len(planned.assigned) == 2 * len(planned.grid.rows)
    assert all(key in path.read_text() for key in ("description:", "rows:"))


@pytest.mark.parametrize(
    ("name", "key", "number"),
    [
        ("lambda_policy", "algorithm.lambda_policy", "lambda_policy"),
        (
            "value_pretraining",
            "components.value_pretraining.num_iterations",
            "value_pretraining_iterations",
        ),
    ],
)
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        pytest.param(("components.length_adaptive_gae.alpha=0.5",), marks=pytest.mark.night),
    ],
)
def test_rows_beside_vc_ppos_scores_are_vc_ppo_but_for_their_own_key(
    name: str, key: str, number: str, overrides: tuple[str, ...]
) -> None:
    base = [*STATE_TRACKING, ROOT / "conf/algorithm/vc_ppo.yaml"]
    vc_ppo = load_config(FitConfig, base, overrides)
    found = read_grid(ROOT / f"conf/sweep/{name}.yaml")
    planned = plan(found, *overrides)
    [entry] = yaml.safe_load((ROOT / f"conf/sweep/{name}.yaml").read_text())["rows"]
    assert list(entry["product"]) == [key]
    for row, value in zip(found.rows, entry["product"][key], strict=True):
        config = planned.row_configs[row.name]
        assert resolve(config) == replace(resolve(vc_ppo), **{number: value}), row.name
        # what is no component too: whitening, the loss's reduction, rewards, the critic's start
        assert differences(config, set_key(vc_ppo, key, value)) == [], row.name
        assert row.system == "vc_ppo"
    assert found.full_system in planned.row_configs


def test_the_published_scores_of_vc_ppo() -> None:
    published = {
        "lambda_policy": {"0.9": 34.3, "0.95": 41.3, "0.99": 41.9, "1.0": 29.4},
        "value_pretraining": {"0": None, "12": 20.6, "24": 30.1, "36": 25.1},
    }
    for name, scores in published.items():
        rows = read_grid(ROOT / f"conf/sweep/{name}.yaml").rows
        assert {row.name.rpartition(" ")[2]: row.paper_score for row in rows} == scores


def test_group_size_keeps_the_number_of_responses() -> None:
    planned = plan(read_grid(ROOT / "conf/sweep/group_size.yaml"))
    sizes = [resolve(config) for config in planned.row_configs.values()]
    assert {numbers.num_prompts * numbers.group_size for numbers in sizes} == {256}
    assert [numbers.group_size for numbers in sizes] == [1, 2, 4, 8, 16, 32]


def test_products_lists_and_named_rows(tmp_path: Path) -> None:
    (tmp_path / "over.yaml").write_text("algorithm: {gamma: 0.5}\n")
    found = grid(
        tmp_path,
        """
rows:
  - product: {algorithm.eps_low: [0.1, 0.2], algorithm.gamma: [0.5]}
    paper_scores: [1, null]
  - list: [{algorithm.gamma: 0.9, algorithm.kl.placement: reward}]
    overrides: {algorithm.kl.coef: 0.1}
  - {row: named, system: mine, configs: [over.yaml], overrides: {critic.value_clip: null}}
""",
    )
    assert [(row.name, row.overrides, row.paper_score) for row in found.rows] == [
        ("eps_low 0.1, gamma 0.5", ("algorithm.eps_low=0.1", "algorithm.gamma=0.5"), 1),
        ("eps_low 0.2, gamma 0.5", ("algorithm.eps_low=0.2", "algorithm.gamma=0.5"), None),
        (
            "gamma 0.9, placement reward",
            ("algorithm.kl.coef=0.1", "algorithm.gamma=0.9", "algorithm.kl.placement=reward"),
            None,
        ),
        ("named", ("critic.value_clip=null",), None),
    ]
    config = plan(found).row_configs
    assert config["named"].algorithm.gamma == 0.5
    assert config["gamma 0.9, placement reward"].algorithm.kl.coef == 0.1


def test_rows_are_merged_over_the_overrides_of_the_command_line(tmp_path: Path) -> None:
    found = grid(tmp_path, "rows: [{product: {algorithm.gamma: [0.9]}}]")
    config = plan(found, "algorithm.gamma=0.5", "algorithm.eps_low=0.1").row_configs["gamma 0.9"]
    assert (config.algorithm.gamma, config.algorithm.eps_low) == (0.9, 0.1)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[]", "grid.yaml:1: a config is a mapping"),
        ("{}", "rows: is missing"),
        ("rows: 5", "grid.yaml:1: rows: Input should be a valid list, got 5"),
        ("rows: []", "rows: List should have at least 1 item"),
        ("row: [{row: a}]", "row: unknown key 'row'; did you mean 'rows'?"),
        ("rows: [{}]", "rows.0: write one of row, without_components, product, list"),
        ("rows: [{row: a, product: {}}]", "rows.0: write one of"),
        ("rows:\n- row: a\n- row: b\n  config: [x]",
         "grid.yaml:4: rows.1.config: unknown key 'config'; did you mean 'configs'?"),
        ("rows: [{list: [{seed: 1}], lists: 1}]", "did you mean 'list'?"),
        ("rows: [{row: a}, {row: a}]", "two rows have the name 'a'"),
        ("{rows: [{row: a}], full_system: b}", "full_system 'b' is not a row"),
        ("rows: [{row: a, component_off: clip_hi}]", "component_off: unknown key 'clip_hi'; did"),
        ("rows: [{without_components: true, paper_scores: {clip: 1}}]",
         "rows.0.paper_scores.clip: unknown key 'clip'"),
        ("rows: [{without_components: false}]", "without_components: Input should be True"),
        ("rows: [{row: a, paper_score: high}]", "paper_score: Input should be a valid number, got"),
        ("rows: [{row: a, paper_score: true}]", "paper_score: Input should be a valid number, got"),
        ("rows: [{product: {seed: 1}}]", "product.seed: Input should be a valid list, got 1"),
        ("rows: [{product: {seed: []}}]", "product.seed: List should have at least 1 item"),
        ("rows: [{product: {seed: [1, 2]}, paper_scores: [1]}]", "1 paper_scores for 2 rows"),
    ],
)  # fmt: skip
def test_errors_name_the_place(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(UserError) as error:
        grid(tmp_path, text)
    assert part in str(error.value)
    assert "grid.yaml" in str(error.value)
    assert "\n" not in str(error.value)


MANY = """\
full_system: VAPO
rows:
  - {row: VAPO}
  - product: {algorithm.eps_low: [0.1, 0.2], components.clip_higher.eps_high: [0.3]}
  - {row: GRPO}
"""


@pytest.mark.parametrize(
    ("chosen", "rows", "full_system"),
    [
        ([], ["VAPO", "eps_low 0.1, eps_high 0.3", "eps_low 0.2, eps_high 0.3", "GRPO"], "VAPO"),
        (["GRPO, VAPO"], ["VAPO", "GRPO"], "VAPO"),
        (["GRPO", "GRPO"], ["GRPO"], None),
        (["GRPO,eps_low 0.2, eps_high 0.3"], ["eps_low 0.2, eps_high 0.3", "GRPO"], None),
        (["eps_low 0.1, eps_high 0.3", "VAPO"], ["VAPO", "eps_low 0.1, eps_high 0.3"], "VAPO"),
    ],
)
def test_rows_are_chosen_by_name(
    tmp_path: Path, chosen: list[str], rows: list[str], full_system: str | None
) -> None:
    found = choose_rows(grid(tmp_path, MANY), chosen)
    assert ([row.name for row in found.rows], found.full_system) == (rows, full_system)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (
            "vapo",
            "the grid has no row 'vapo'; did you mean 'VAPO'? rows: VAPO; eps_low 0.1, eps_hi",
        ),
        ("VAPO,GPRO", "no row 'GPRO'; did you mean 'GRPO'?"),
        ("eps_low 0.1", "no row 'eps_low 0.1'; did you mean 'eps_low 0.1, eps_high 0.3'?"),
        ("something else", "no row 'something else'; rows: VAPO"),
        ("VAPO,", "no row ''; rows"),
    ],
)
def test_a_row_that_is_not_there_is_told_with_the_nearest(
    tmp_path: Path, chosen: str, said: str
) -> None:
    with pytest.raises(UserError, match=r"^--rows: ") as error:
        choose_rows(grid(tmp_path, MANY), [chosen])
    assert said in str(error.value)


def test_a_rows_wrong_config_names_the_row(tmp_path: Path) -> None:
    found = grid(tmp_path, "rows: [{product: {algorithm.gama: [1]}}]")
    with pytest.raises(UserError, match=r"row 'gama 1' of the grid: .*did you mean"):
        plan(found)


def test_a_grid_that_never_ends() -> None:
    with pytest.raises(UserError, match="--grid /dev/zero: larger than"):
        read_grid(Path("/dev/zero"))
