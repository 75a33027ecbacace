"""Two processes: stopped together, one lost, and resumed by another number of processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.config.fits import ON_STATE_TRACKING
from tests.integration.commands import ROOT, SMALL
from tests.runs import runs
from tests.runs.comparing import assert_same, assert_same_run
from vapo.runs.checkpoints import read_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

FSDP = "trainer.strategy=fsdp"
SHARDS = "trainer.sharded_checkpoints=true"
LAST = ["--ckpt_path", "last"]


def pair(folder: Path, store: Path, *arguments: str, hook: tuple[str, ...] = ()) -> list[int]:
    """The exit codes of two processes that have the same hook."""
    processes = runs.two_ranks(folder, *runs.where(folder, store), *arguments, hooks=(hook, hook))
    return [runs.end(process) for process in processes]


def tail(folder: Path) -> str:
    return "".join(path.read_text()[-2000:] for path in sorted(folder.glob("log*.txt")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    folder = tmp_path_factory.mktemp("whole_pair")
    assert pair(folder, store) == [0, 0], tail(folder)
    return folder


@pytest.mark.slow
def test_one_is_killed_and_the_other_stops(tmp_path: Path, store: Path) -> None:
    auto = [*runs.where(tmp_path, store), "checkpoints.resume=auto"]
    processes = runs.two_ranks(tmp_path, *auto, hooks=((), ("kill_at", "minibatch", "2")))
    assert runs.end(processes[1]) == -signal.SIGKILL
    assert runs.end(processes[0]) == 75, tail(tmp_path)
    last = (tmp_path / "log0.txt").read_text().splitlines()[-1]
    assert last.startswith("vapo: another process of this run has ended")


@pytest.mark.kills  # test_composite_resume.py resumes a run of one process
def test_one_is_lost_and_both_are_stopped(tmp_path: Path, whole: Path, store: Path) -> None:
    """Rank 1 is killed; rank 1 alone gets a signal, and both stop; then it is the same run."""
    auto = [*runs.where(tmp_path, store), "checkpoints.resume=auto"]
    processes = runs.two_ranks(tmp_path, *auto, hooks=((), ("kill_at", "minibatch", "4")))
    assert runs.end(processes[1]) == -signal.SIGKILL
    assert runs.end(processes[0]) == 75, tail(tmp_path)
    hook = ("signal_at", "minibatch", "3", "SIGTERM")
    processes = runs.two_ranks(tmp_path, *auto, hooks=((), hook))
    assert [runs.end(process) for process in processes] == [143, 143], tail(tmp_path)
    assert pair(tmp_path, store, "checkpoints.resume=auto") == [0, 0], tail(tmp_path)
    assert_same_run(tmp_path, whole)
    assert "they are not sampled again" in (tmp_path / "log0.txt").read_text()


def restored(
    folder: Path, store: Path, dump: Path, *arguments: str, two: bool = False
) -> dict[str, Any]:
    """What a resumed run has before its first rollout."""
    hook, common = ("dump_before_rollouts", str(dump)), [*arguments, *LAST]
    if two:
        assert pair(folder, store, *common, hook=hook) == [0, 0], tail(folder)
    else:
        log = folder / "log_one.txt"
        assert runs.fit(log, *runs.where(folder, store), *common, hook=hook) == 0, tail(folder)
    return load(dump)


def load(path: Path) -> dict[str, Any]:
    contents = torch.load(path, weights_only=True)
    return {
        k: contents[k] for k in ("state_dict", "optimizer_states", "lr_schedulers", "callbacks")
    }


@pytest.mark.kills  # test_sharded_fit.py has such a run
@pytest.mark.parametrize("shards", [False, True], ids=["file", "shards"])
def test_another_number_of_processes_begins_with_the_same_state(
    tmp_path: Path, store: Path, shards: bool
) -> None:
    """Two processes killed in the policy phase, then one, then two from what the one wrote."""
    sharded = [SHARDS] if shards else []
    hook = ("kill_at", "minibatch", "8")
    assert pair(tmp_path, store, *sharded, hook=hook) == [-signal.SIGKILL] * 2, tail(tmp_path)
    by_two = restored(tmp_path, store, tmp_path / "two.pt", FSDP, two=True)
    by_one = restored(tmp_path, store, tmp_path / "one.pt", FSDP)
    assert int(by_two["state_dict"]["iteration"]) == 3
    assert int(by_two["state_dict"]["phase_index"]) == 1
    assert {int(s["step"]) for s in by_two["optimizer_states"][0]["state"].values()} == {2}
    assert_same(by_one, by_two)
    if not shards:
        written = load(runs.only_run(tmp_path) / "checkpoints/last.ckpt/state.pt")
        assert_same(by_two, written)
        unsharded = restored(tmp_path, store, tmp_path / "auto.pt")
        assert_same(unsharded["state_dict"], by_two["state_dict"])
        assert_same(unsharded["optimizer_states"], by_two["optimizer_states"])
    log = tmp_path / "log_one.txt"
    one = [*runs.where(tmp_path, store), FSDP, *sharded, *LAST]
    assert runs.fit(log, *one, hook=("kill_at", "minibatch", "4")) == -signal.SIGKILL
    by_two = restored(tmp_path, store, tmp_path / "two.pt", FSDP, two=True)
    by_one = restored(tmp_path, store, tmp_path / "one.pt", FSDP)
    assert int(by_two["state_dict"]["iteration"]) == 4
    assert_same(by_one, by_two)


@pytest.mark.kills  # test_checkpointing.py has what one process writes, and when
@pytest.mark.parametrize("shards", [False, True], ids=["file", "shards"])
def test_saving_in_the_background(tmp_path: Path, whole: Path, store: Path, shards: bool) -> None:
    """One is lost in the next iteration, while the first still saves; then it is the same run."""
    arguments = [*([SHARDS] if shards else []), "checkpoints.save_in_background=true"]
    auto = [*runs.where(tmp_path, store), *arguments, "checkpoints.resume=auto"]
    hooks = (("slowed_at", "manifest", "2", "3"), ("kill_at", "minibatch", "5"))
    processes = runs.two_ranks(tmp_path, *auto, hooks=hooks)
    assert [runs.end(process) for process in processes] == [75, -signal.SIGKILL], tail(tmp_path)
    last = read_checkpoint(runs.only_run(tmp_path) / "checkpoints/last.ckpt")
    assert int(last["state_dict"]["iteration"]) in (1, 2)  # as fast as it was killed
    assert pair(tmp_path, store, *arguments, "checkpoints.resume=auto") == [0, 0], tail(tmp_path)
    if shards:
        states = [runs.state(runs.only_run(folder)) for folder in (tmp_path, whole)]
        assert_same(states[0]["state_dict"], states[1]["state_dict"])
    else:
        assert_same_run(tmp_path, whole)


def is_command(arguments: list[str]) -> bool:
    """Whether these are `vapo fit` or `python -m vapo fit`, as Lightning starts it once more."""
    before = arguments[arguments.index("fit") - 1] if "fit" in arguments[1:] else ""
    return Path(before).name == "vapo" or before in ("vapo.__main__", "vapo")


@pytest.mark.kills  # test_one_is_lost_and_both_are_stopped has forked ones
def test_a_lost_process_that_lightning_started(tmp_path: Path, store: Path) -> None:
    """The command itself, with two processes of its own: it says so and ends within seconds."""
    arguments = [*SMALL, FSDP, "trainer.devices=2", "training.num_iterations=50"]
    command = [sys.executable, "-u", "-m", "vapo", "fit", *ON_STATE_TRACKING]
    process = subprocess.Popen(
        [*command, *arguments, *runs.where(tmp_path, store)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("iteration 2"):
            break
    child = next(
        process
        for process in psutil.Process(process.pid).children()
        if is_command(process.cmdline())
    )
    child.kill()
    started = time.monotonic()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said[-3000:]
    assert "process 1 of this run has ended (signal 9); the last checkpoint is whole" in said
    assert time.monotonic() - started < 60
