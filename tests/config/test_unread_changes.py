"""What the command line changed and nothing reads is an error of a run, and of a grid."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import ROOT, write
from vapo.cli import main
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.config.unread_changes import (
    check_changes_are_read,
    check_rows_are_read,
    unread_changes,
)
from vapo.errors import UserError
from vapo.sweep.grid import read_grid
from vapo.sweep.plan import compose_rows

VAPO, GRPO = ROOT / "conf/vapo.yaml", ROOT / "conf/algorithm/grpo.yaml"


@pytest.mark.parametrize(
    ("files", "overrides", "said"),
    [
        ([VAPO], ["algorithm.lambda_policy=0.5"], "algorithm.lambda_policy=0.5 has no effect"),
        ([VAPO, GRPO], ["algorithm.lambda_policy=0.5"], "group_relative has no lambda"),
        ([VAPO, GRPO], ["critic.optimizer.lr=5.0"], "group_relative has no critic"),
        (
            [VAPO],
            ["components.clip_higher.enabled=false", "components.clip_higher.eps_high=0.4"],
            "eps_high=0.4 has no effect: components.clip_higher.enabled is false",
        ),
    ],
    ids=["lambda", "no lambda", "critic", "component"],
)
def test_a_typed_key_that_nothing_reads(files: list[Path], overrides: list[str], said: str) -> None:
    (line,) = unread_changes(load_config(FitConfig, files, overrides))
    assert said in line


@pytest.mark.parametrize(
    ("files", "overrides"),
    [
        ([VAPO, GRPO], []),
        ([VAPO], ["components.length_adaptive_gae.enabled=false", "algorithm.lambda_policy=0.5"]),
        ([VAPO], ["critic.optimizer.lr=1e-4", "components.clip_higher.eps_high=0.3"]),
        ([VAPO], ["components.positive_example_lm_loss.enabled=false"]),
    ],
)
def test_files_and_keys_that_are_read(files: list[Path], overrides: list[str]) -> None:
    assert list(unread_changes(load_config(FitConfig, files, overrides))) == []


@pytest.mark.parametrize("key", ["critic.epochs=2", "critic.optimizer.lr=5.0", "critic.loss=x"])
def test_a_run_with_a_key_that_nothing_reads_does_not_start(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever key of the critic it is; one of them a rule knows, too."""
    monkeypatch.chdir(ROOT)
    key = key.replace("=x", "=cross_entropy")
    assert main(["fit", "--config", str(VAPO), "--config", str(GRPO), key]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vapo: command line: {key.split('=')[0]}")
    assert "has no effect: algorithm.advantage_estimator group_relative has no critic" in line


def rows_of(folder: Path, overrides: str, *typed: str) -> None:
    text = f"""
rows:
  - {{row: VAPO}}
  - {{row: GRPO, configs: [{GRPO}], overrides: {overrides}}}
"""
    grid = read_grid(write(folder, text, "grid.yaml"))
    check_rows_are_read(compose_rows(grid, [VAPO], typed)[1])


def test_a_row_s_own_key_that_nothing_reads_is_an_error(tmp_path: Path) -> None:
    said = "row 'GRPO' of the grid: overrides: critic.epochs=2 has no effect"
    with pytest.raises(UserError, match=said):
        rows_of(tmp_path, "{critic.epochs: 2}")


def test_a_key_for_all_rows_has_to_be_read_by_one(tmp_path: Path) -> None:
    rows_of(tmp_path, "{}", "critic.epochs=2", "components.value_pretraining.num_iterations=1")
    with pytest.raises(
        UserError, match=r"^command line: algorithm.lambda_policy=0.5 has no effect"
    ):
        rows_of(tmp_path, "{}", "algorithm.lambda_policy=0.5")


def test_the_settings_of_a_component_wait_for_its_switch() -> None:
    typed = ["components.value_pretraining.num_iterations=1"]
    config = load_config(FitConfig, [VAPO, GRPO], typed)
    check_changes_are_read(config)
    (line,) = unread_changes(config)
    assert "components.value_pretraining.enabled is false" in line
