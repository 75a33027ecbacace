"""CSV files and Weights & Biases beside MLflow; a stand-in for W&B's package records the calls."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from tests.config.fits import fit_config
from tests.tracking.trouble import client_of
from vapo.commands import fit
from vapo.config.schema import TrackingConfig
from vapo.errors import UserError
from vapo.tracking.also import check_also
from vapo.tracking.logger import RunLogger


class FakeRun:
    """What `wandb.init` gives."""

    def __init__(self, calls: list[tuple[str, Any]]) -> None:
        self.calls = calls
        self.config = self
        self.fails = False

    def update(self, params: dict[str, Any], **_: Any) -> None:
        self.calls.append(("config", params))

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log(self, metrics: dict[str, float]) -> None:
        if self.fails:
            raise ConnectionError("W&B is away")
        self.calls.append(("log", metrics))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))


class FakeWandb(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None, origin="wandb/__init__.py")
        self.calls: list[tuple[str, Any]] = []
        self.run: FakeRun | None = None
        self.begun = FakeRun(self.calls)

    def init(self, **options: Any) -> FakeRun:
        self.calls.append(("init", options))
        return self.begun


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    lib, run = ModuleType("wandb.sdk.lib"), ModuleType("wandb.wandb_run")
    lib.RunDisabled = type("RunDisabled", (), {})  # type: ignore[attr-defined]
    run.Run = FakeRun  # type: ignore[attr-defined]
    for module in (fake, ModuleType("wandb.sdk"), lib, run):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", True)
    monkeypatch.setenv("WANDB_MODE", "offline")
    return fake


def also(tracking: TrackingConfig, *names: Any) -> TrackingConfig:
    return replace(tracking, also=list(names))


def rows_of(path: Path) -> list[dict[str, float]]:
    with path.open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


@pytest.mark.slow
def test_csv_files_lie_in_the_runs_folder(tracking: TrackingConfig, tmp_path: Path) -> None:
    journal = tmp_path / "tracking"
    config = also(tracking, "csv")
    with RunLogger(config, run_name="x", journal=journal) as first:
        first.policy_begins_at = 3
        first.log_metrics({"eval/avg_at_k": 0.5, "kl[0]": float("inf")}, step=3)
        first.log_metrics({"actor/entropy": 2.0}, step=1)
        rows = rows_of(tmp_path / "csv/version_0/metrics.csv")  # before the run's end
        assert rows[1] == {"step": -2.0, "actor/entropy": 2.0}, "of value pretraining"
        assert rows[0]["eval/avg_at_k"] == 0.5
        assert rows[0]["kl_0_"] != rows[0]["kl_0_"], "nan, as in MLflow"
    with RunLogger(config, run_name="x", run_id=first.run_id, journal=journal) as again:
        again.skip_recorded()
        again.policy_begins_at = 3
        again.log_metrics({"actor/entropy": 2.0}, step=1)
        again.log_metrics({"actor/entropy": 3.0}, step=2)
    assert rows_of(tmp_path / "csv/version_0/metrics.csv")[1] == rows[1]
    assert rows_of(tmp_path / "csv/version_1/metrics.csv") == [{"step": -1.0, "actor/entropy": 3.0}]
    metrics = client_of(tracking).get_run(str(first.run_id)).data.metrics
    assert metrics["eval/avg_at_k"] == 0.5


@pytest.mark.slow
def test_wandb_gets_the_run_its_config_and_metrics(
    tracking: TrackingConfig, tmp_path: Path, wandb: FakeWandb
) -> None:
    config = also(tracking, "wandb")
    with RunLogger(config, run_name="my run", journal=tmp_path / "tracking") as logger:
        logger.log_config("a: 1\n", {"a": 1})
        logger.policy_begins_at = 5
        logger.log_metrics({"eval/avg_at_k": 0.5}, step=3)
    (_, options), *rest = wandb.calls
    expected = {
        "name": "my run",
        "project": "tests",
        "id": logger.run_id,
        "resume": "allow",
        "dir": str(tmp_path),
        "tags": ["who=config"],
    }
    assert expected.items() <= options.items()
    assert options["settings"]["x_disable_meta"], "the command's arguments may hold a password"
    assert options["settings"]["console"] == "off"
    assert rest == [
        ("config", {"a": 1}),
        ("log", {"eval/avg_at_k": 0.5, "trainer/global_step": -2}),
        ("finish", 0),
    ]


@pytest.mark.slow
def test_wandb_that_fails_is_left_out_and_said_once(
    tracking: TrackingConfig, tmp_path: Path, wandb: FakeWandb
) -> None:
    notes: list[str] = []
    config = also(tracking, "wandb", "csv")
    wandb.begun.fails = True
    with RunLogger(config, run_name="x", journal=tmp_path / "tracking", note=notes.append) as run:
        for step in range(3):
            run.log_metrics({"a": 1.0}, step=step)
    assert [note for note in notes if "also" in note] == [
        "tracking.also: wandb failed, and the run continues without it, recorded in MLflow: "
        "W&B is away"
    ]
    assert len(rows_of(tmp_path / "csv/version_0/metrics.csv")) == 3
    assert len(client_of(tracking).get_metric_history(str(run.run_id), "a")) == 3


def test_what_wandb_needs_is_said_before_anything_is_done(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fit_config(tmp_path, "tracking.also=[wandb]", f"output_dir={tmp_path / 'runs'}")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(UserError, match="export WANDB_API_KEY, or WANDB_MODE=offline"):
        fit.run(config)
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr("vapo.tracking.also.find_spec", lambda name: None)
    with pytest.raises(UserError, match="wandb is not installed: `pip install wandb`"):
        fit.run(config)
    assert wandb.calls == []
    assert not (tmp_path / "runs").exists()


def test_a_command_without_a_folder_says_so(tracking: TrackingConfig) -> None:
    notes: list[str] = []
    RunLogger(also(tracking, "csv"), run_name="x", note=notes.append).close()
    assert notes == ["tracking.also: a command without a run's folder records in MLflow only"]


def test_wandb_that_cannot_begin_is_an_error_at_the_start(
    tracking: TrackingConfig, tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> FakeRun:
        raise ValueError("the key is not valid")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(
        UserError, match=r"tracking\.also: wandb cannot begin: the key is not valid"
    ):
        RunLogger(also(tracking, "wandb"), run_name="x", journal=tmp_path / "tracking")


def test_a_folder_named_wandb_is_not_the_package(
    tracking: TrackingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own runs leave one in the working directory."""
    (tmp_path / "wandb/run-1").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(UserError, match="wandb is not installed"):
        check_also(also(tracking, "wandb"))


def test_a_users_own_logger_that_fails_is_not_blamed_on_the_config(
    tracking: TrackingConfig, tmp_path: Path
) -> None:
    class Broken(CSVLogger):
        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            raise ConnectionError("its server is away")

    notes: list[str] = []
    with RunLogger(
        tracking,
        run_name="x",
        journal=tmp_path / "tracking",
        note=notes.append,
        loggers=[CSVLogger(tmp_path / "a"), Broken(tmp_path / "b")],
    ) as run:
        run.log_metrics({"a": 1.0}, step=0)
    assert notes == [
        "logger 2 given from Python, Broken, failed, and the run continues without it, recorded "
        "in MLflow: its server is away"
    ]
