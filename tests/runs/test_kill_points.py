"""A run that is killed or stopped at chosen points ends as one that nothing stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.runs import runs
from tests.runs.comparing import assert_same, assert_same_run
from vapo.runs.checkpoints import read_checkpoint

AUTO = "checkpoints.resume=auto"
KILLED = -signal.SIGKILL
ONE_POLICY_AHEAD = ["training.max_staleness=1", "training.update_open_rollouts=false"]
DYNAMIC = [
    "algorithm.advantage_estimator=greedy_baseline",
    "algorithm.dynamic_sampling_attempts=2",
    "components.decoupled_gae.enabled=false",
    "components.length_adaptive_gae.enabled=false",
    "components.value_pretraining.enabled=false",
]


def log_of(folder: Path) -> str:
    return (folder / "log.txt").read_text()


def fit(folder: Path, store: Path, *arguments: str, hook: tuple[str, ...] = ()) -> int:
    return runs.fit(folder / "log.txt", *runs.where(folder, store), AUTO, *arguments, hook=hook)


def killed_at(folder: Path, store: Path, points: list[tuple[str, int]], *arguments: str) -> None:
    """One session for each point, and one to the end."""
    for place, count in points:
        hook = ("kill_at", place, str(count))
        assert fit(folder, store, *arguments, hook=hook) == KILLED, log_of(folder)[-3000:]
    assert fit(folder, store, *arguments) == 0, log_of(folder)[-3000:]


@pytest.mark.parametrize(
    "points",
    [
        pytest.param([("minibatch", 2)], marks=pytest.mark.slow),
        pytest.param([("minibatch", 2), ("renaming", 2)], marks=pytest.mark.kills),
    ],
    ids=["training", "training and saving"],
)
def test_killed_while_training_and_saving(
    points: list[tuple[str, int]], tmp_path: Path, whole: Path, store: Path
) -> None:
    """Before the first checkpoint, and before the last of value pretraining gets its name."""
    killed_at(tmp_path, store, points)
    assert_same_run(tmp_path, whole)
    assert log_of(tmp_path).count("they are not sampled again") == len(points)


@pytest.mark.kills
@pytest.mark.timeout(3600)
def test_killed_at_every_step_of_a_save(tmp_path: Path, whole: Path, store: Path) -> None:
    points = [("sampling", 1), ("keeping", 1), ("torch.save", 1), ("manifest", 1), ("linking", 1)]
    killed_at(tmp_path, store, [*points, ("forgetting", 1), ("minibatch", 4), ("sync", 9)])
    assert_same_run(tmp_path, whole)


@pytest.mark.kills
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "arguments",
    [ONE_POLICY_AHEAD, DYNAMIC, ["checkpoints.every_n_iterations=3"]],
    ids=["sampled ahead", "dynamic sampling and greedy baseline", "checkpoints now and then"],
)
def test_rollouts_are_kept_however_they_are_made(
    tmp_path: Path, store: Path, arguments: list[str]
) -> None:
    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    assert fit(folders[0], store, *arguments) == 0, log_of(folders[0])[-3000:]
    killed_at(folders[1], store, [("minibatch", 4)], *arguments)
    assert "they are not sampled again" in log_of(folders[1])
    assert_same_run(folders[1], folders[0])


@pytest.mark.kills  # tests/runs/test_stopping.py has the parts of a stop
def test_signals_stop_a_run_which_can_be_resumed(tmp_path: Path, whole: Path, store: Path) -> None:
    for place, count, name in (("minibatch", 3, "SIGTERM"), ("kept", 2, "SIGUSR1")):
        code = fit(tmp_path, store, hook=("signal_at", place, str(count), name))
        assert code == 128 + getattr(signal, name)
        assert f"vapo: stopped by {name}; resume with --ckpt_path" in log_of(tmp_path)
    assert fit(tmp_path, store) == 0
    assert_same_run(tmp_path, whole)


@pytest.mark.attacks
def test_a_full_disk_ends_the_run_and_spoils_nothing(
    tmp_path: Path, whole: Path, store: Path
) -> None:
    assert fit(tmp_path, store, hook=("full_disk_at", "torch.save", "3")) == 75
    run = runs.only_run(tmp_path)
    last = log_of(tmp_path).splitlines()[-1]
    assert last.startswith("vapo: cannot write the checkpoint")
    assert "No space left" in last
    assert int(read_checkpoint(run / "checkpoints/last.ckpt")["state_dict"]["iteration"]) == 2
    assert fit(tmp_path, store) == 0
    assert_same(runs.state(run), runs.state(runs.only_run(whole)))


@pytest.mark.slow
def test_auto_starts_anew_once_the_run_has_finished(whole: Path, store: Path) -> None:
    """And the state of the record is what says so."""
    run = runs.only_run(whole)
    record = json.loads((run / "run.json").read_text())
    assert record["state"] == "finished"
    assert fit(whole, store, hook=("kill_at", "sampling", "1")) == KILLED
    assert "no unfinished run of this config" in log_of(whole)
    (new,) = [path for path in (whole / "runs").iterdir() if path != run]
    assert json.loads((new / "run.json").read_text())["identity"] == record["identity"]
    for path in sorted(new.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    new.rmdir()
