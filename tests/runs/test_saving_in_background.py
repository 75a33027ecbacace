"""Runs with `checkpoints.save_in_background`: held back, killed, stopped and out of room."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.runs import runs
from tests.runs.comparing import assert_same, assert_same_run
from tests.runs.test_kill_points import KILLED, fit, killed_at, log_of
from vapo.runs.checkpoints import read_checkpoint

BACKGROUND = "checkpoints.save_in_background=true"
# the save of iteration 2 waits until training is at the last minibatch of iteration 3
NEXT_ITERATION = ("minibatch", "6")
SAVE_OF_2 = {"torch.save": "2", "manifest": "2", "renaming": "2", "linking": "2", "forgetting": "2"}

pytestmark = pytest.mark.timeout(3600)


def held(place: str, action: str) -> tuple[str, ...]:
    return ("held_until", place, SAVE_OF_2[place], *NEXT_ITERATION, action)


def last_iteration(run: Path) -> int:
    return int(read_checkpoint(run / "checkpoints/last.ckpt")["state_dict"]["iteration"])


@pytest.mark.kills  # tests/runs/test_checkpointing.py has what it writes and when
def test_a_save_that_takes_an_iteration_is_of_the_state_before_it(
    tmp_path: Path, whole: Path, store: Path
) -> None:
    """Every checkpoint is that of a run which waits for each of them."""
    keep = [BACKGROUND, "checkpoints.keep=9"]
    assert fit(tmp_path, store, *keep, hook=held("torch.save", "continue")) == 0, log_of(tmp_path)
    assert_same_run(tmp_path, whole)
    found = runs.only_run(tmp_path) / "checkpoints"
    assert len(list(found.glob("iteration_*"))) == 5
    for path in (runs.only_run(whole) / "checkpoints").glob("iteration_*"):
        ours, theirs = read_checkpoint(found / path.name), read_checkpoint(path)
        for name in ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "loops"):
            assert_same(ours[name], theirs[name], name)


@pytest.mark.kills
@pytest.mark.parametrize("place", SAVE_OF_2)
def test_killed_in_the_next_iteration_while_it_saves(
    tmp_path: Path, whole: Path, store: Path, place: str
) -> None:
    """The run resumes from the checkpoint before, with the kept rollouts of both iterations."""
    assert fit(tmp_path, store, BACKGROUND, hook=held(place, "SIGKILL")) == KILLED
    run = runs.only_run(tmp_path)
    is_in_place = place == "forgetting"
    assert last_iteration(run) == (2 if is_in_place else 1)
    kept = {path.name.split("_")[1] for path in (run / "rollouts").glob("*.parquet")}
    assert kept == {"000001", "000002"}
    killed_at(tmp_path, store, [], BACKGROUND)
    assert_same_run(tmp_path, whole)
    assert log_of(tmp_path).count("they are not sampled again") == (1 if is_in_place else 2)


@pytest.mark.kills  # tests/runs/test_checkpointing.py has a full disk
def test_a_full_disk_ends_the_run_at_the_next_iterations_end(
    tmp_path: Path, whole: Path, store: Path
) -> None:
    for count, finished in (("3", 2), ("3", 4)):  # then of the last save: the run's end waits
        assert fit(tmp_path, store, BACKGROUND, hook=("full_disk_at", "torch.save", count)) == 75
        run = runs.only_run(tmp_path)
        last = log_of(tmp_path).splitlines()[-1]
        assert last.startswith("vapo: cannot write the checkpoint")
        assert "No space left" in last
        assert "Traceback" not in log_of(tmp_path)
        assert last_iteration(run) == finished
    assert log_of(tmp_path).count("\niteration 4/5") == 2, "it trained for one iteration more"
    assert fit(tmp_path, store, BACKGROUND) == 0
    assert_same_run(tmp_path, whole)


@pytest.mark.kills
def test_a_stop_waits_for_the_save(tmp_path: Path, whole: Path, store: Path) -> None:
    hook = held("torch.save", "SIGTERM")
    assert fit(tmp_path, store, BACKGROUND, hook=hook) == 128 + signal.SIGTERM
    assert "vapo: stopped by SIGTERM; resume with --ckpt_path" in log_of(tmp_path)
    run = runs.only_run(tmp_path)
    assert last_iteration(run) == 2
    assert not list((run / "checkpoints").glob(".iteration_*"))
    hook = ("held_until", "torch.save", "1", "minibatch", "4", "full disk")
    assert fit(tmp_path, store, BACKGROUND, hook=hook) == 128 + signal.SIGTERM
    assert "vapo: cannot write the checkpoint" in log_of(tmp_path), "it is said, too"
    assert fit(tmp_path, store, BACKGROUND) == 0
    assert_same_run(tmp_path, whole)
