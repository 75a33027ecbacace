"""Sweeps in which a script stands in for the training process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.config.fits import ROOT, STATE_TRACKING
from vapo.sweep import work
from vapo.sweep.grid import Grid, read_grid
from vapo.sweep.identity import code_version
from vapo.sweep.plan import Plan, make_plan

# What `vapo fit` leaves; fails for seed 13, and for the switch that the test breaks.
FAKE_FIT = """\
import json, os, pathlib, sys, yaml
config = yaml.safe_load(open(sys.argv[1]))
run = pathlib.Path(config["output_dir"]) / "20250101-000000_fake"
run.mkdir(parents=True, exist_ok=True)
with open(run.parent.parent / "starts", "a") as starts:
    starts.write(" ".join(sys.argv[2:]) + "\\n")
print("threads", os.environ["OMP_NUM_THREADS"], config["trainer"]["num_threads"])
print("gpus", os.environ.get("CUDA_VISIBLE_DEVICES"))
if config["seed"] % 1000 == 13:
    sys.exit("the reward model is not there")
if config["training"]["num_iterations"] == 0:
    (run / "pretrained_critic").mkdir(exist_ok=True)
else:
    assert config["critic"]["init"].startswith(("reward_model", "/")), config["critic"]["init"]
(run / "summary.json").write_text(json.dumps({"score_after": 0.5, "mlflow_run_id": None}))
"""


@pytest.fixture
def fake_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fake_fit.py"
    script.write_text(FAKE_FIT)

    def command(config: Path, checkpoint: Path | None) -> list[str]:
        resumed = [] if checkpoint is None else [str(checkpoint)]
        return [sys.executable, str(script), str(config), *resumed]

    monkeypatch.setattr(work, "fit_command", command)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code_version.cache_clear()


def grid(folder: Path, text: str, name: str = "grid.yaml") -> Grid:
    path = folder / name
    path.write_text(text)
    return read_grid(path)


def plan(grid: Grid, *overrides: str, seeds: Sequence[int] = (0,)) -> Plan:
    return make_plan(grid, STATE_TRACKING, overrides, seeds)


def ablation() -> Grid:
    """The shipped ablation."""
    return read_grid(ROOT / "conf/sweep/ablation.yaml")
