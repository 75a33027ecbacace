"""`vapo fit --smoke`: what it shortens, refuses and leaves behind. Its sessions are stand-ins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.fits import fit_config
from tests.studies.smoke.test_forecast import sessions
from vapo.cli import main
from vapo.commands import smoke
from vapo.config import FitConfig
from vapo.errors import UserError
from vapo.studies.smoke.forecast import Session
from vapo.user_code.python_child import python_program


def config_in(folder: Path, *overrides: str) -> FitConfig:
    own = (f"output_dir={folder / 'runs/mine'}", f"tracking.uri={folder / 'mlruns'}")
    return fit_config(folder, *own, *overrides)


def test_a_smoke_test_has_one_iteration_of_each_phase_at_the_runs_own_sizes(tmp_path: Path) -> None:
    config = config_in(tmp_path, "tracking.also=[wandb]", "evaluation.every_n_iterations=1")
    short, num_first = smoke.shortened(config, tmp_path / "smoke")
    assert num_first == 2
    assert short.components.value_pretraining.num_iterations == 1
    assert short.training.num_iterations == config.training.num_iterations == 300
    assert short.evaluation.every_n_iterations == 300
    assert short.checkpoints.every_n_iterations == 2
    assert short.output_dir == str(tmp_path / "smoke/runs")
    assert (short.tracking.uri, short.tracking.also) == (str(tmp_path / "smoke/mlruns"), [])
    assert short.components.group_sampling == config.components.group_sampling
    assert replace(short.evaluation, every_n_iterations=1) == config.evaluation
    assert short.rollouts == config.rollouts


@pytest.mark.parametrize(
    ("overrides", "pretraining", "policy", "num_first"),
    [
        (["training.num_iterations=1"], 1, 3, 2),
        (["components.value_pretraining.enabled=false"], 50, 300, 1),
        (["training.num_iterations=0"], 3, 0, 1),
    ],
    ids=["short", "no pretraining", "pretraining alone"],
)
def test_no_iteration_of_it_is_the_last(
    tmp_path: Path, overrides: list[str], pretraining: int, policy: int, num_first: int
) -> None:
    """After its last iteration a run has nothing to resume for, and is evaluated."""
    short, first = smoke.shortened(config_in(tmp_path, *overrides), tmp_path / "smoke")
    assert first == num_first
    assert short.components.value_pretraining.num_iterations == pretraining
    assert short.training.num_iterations == policy


def test_a_run_without_an_iteration_is_refused(tmp_path: Path) -> None:
    none = ["training.num_iterations=0", "components.value_pretraining.enabled=false"]
    with pytest.raises(UserError, match="this run has no iteration"):
        smoke.shortened(config_in(tmp_path, *none), tmp_path / "smoke")


def test_what_cannot_be_tried_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path)
    with pytest.raises(UserError, match="--smoke begins a run, and resumes that run: leave --ckpt"):
        smoke.run(config, ckpt_path="last")
    hosts = ["trainer.num_nodes=2", "trainer.devices=2", "trainer.strategy=fsdp"]
    with pytest.raises(UserError, match=r"of one host, and trainer.num_nodes is 2"):
        smoke.run(config_in(tmp_path, *hosts))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="a launcher has set RANK"):
        smoke.run(config)
    assert not (tmp_path / "runs").exists()


def test_a_tracking_server_that_is_away_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tracking.uri: no usable MLflow store at http://127.0"):
        smoke.run(config_in(tmp_path, "tracking.uri=http://127.0.0.1:9"))
    assert not (tmp_path / "runs").exists()


def test_a_sweep_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--config conf/vapo.yaml --grid conf/sweep/ablation.yaml --smoke"
    assert main(["sweep", *words.split()]) == 2
    assert "unknown option '--smoke'" in capsys.readouterr().err


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Path | None]]:
    """Replace the sessions; the list has the last iteration and the checkpoint of each."""
    begun: list[tuple[int, Path | None]] = []

    def stand_in(
        config: FitConfig, file: Path, last: int, checkpoint: Path | None, *, quiet: bool
    ) -> Session:
        begun.append((last, checkpoint))
        run = file.parent / "runs/some_run"
        (run / "checkpoints/last.ckpt").mkdir(parents=True, exist_ok=True)
        (run / "summary.json").write_text(json.dumps({"warnings": ["bad"], "faults": {"x": 0}}))
        return sessions()[len(begun) - 1]

    monkeypatch.setattr(smoke, "run_session", stand_in)
    return begun


@pytest.mark.parametrize("is_new", [True, False])
def test_two_sessions_are_reported_and_leave_nothing(
    stand_ins: list[tuple[int, Path | None]], tmp_path: Path, is_new: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if not is_new:
        (tmp_path / "runs/mine").mkdir(parents=True)
    smoke.run(config_in(tmp_path), quiet=True)
    (first, nothing), (second, checkpoint) = stand_ins
    assert (first, nothing, second) == (2, None, 3)
    assert checkpoint is not None
    assert checkpoint.name == "last.ckpt"
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("The run began, saved a checkpoint, was resumed from it in a new pr")
    assert "evaluation          7.0" in lines
    assert "time: about " in "\n".join(lines)
    assert "warned: bad" in lines
    left = [] if is_new else [tmp_path / "runs", tmp_path / "runs/mine"]
    assert [path for path in tmp_path.rglob("*") if path.is_dir()] == left


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "raise SystemExit(3)",
            r"--smoke: the run failed \(exit code 3, its reason is above\); it",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            r"killed by SIGKILL, as the system does where the host's memory is full\); its files",
        ),
    ],
    ids=["an error", "out of memory"],
)
def test_a_session_that_fails_ends_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    monkeypatch.setattr(smoke, "fit_command", lambda file, checkpoint: python_program(program))
    with pytest.raises(UserError, match=said):
        smoke.run(config_in(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_stops_the_session_and_removes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session has begun and waits; it takes SIGTERM, and writes that it has."""
    mark, started = tmp_path / "stopped", tmp_path / "started"
    program = (
        "import pathlib, signal, sys, time\n"
        f"def stop(*_): pathlib.Path({str(mark)!r}).touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        f"pathlib.Path({str(started)!r}).touch()\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(smoke, "fit_command", lambda file, checkpoint: python_program(program))
    wait = smoke.subprocess.Popen.wait

    def interrupted(process: smoke.subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is not None:
            return wait(process, timeout)
        while not started.exists():
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(smoke.subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smoke.run(config_in(tmp_path))
    assert mark.exists()
    assert not (tmp_path / "runs").exists()
