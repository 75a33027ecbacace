"""When a checkpoint is written, in which order, and which of them stay; in both ways of saving."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from safetensors import SafetensorError

from tests.config.fits import fit_config
from tests.runs.test_manifests import write
from vapo.errors import InterruptedRunError
from vapo.errors.shown_text import shown_size
from vapo.rollouts.kept_rollouts import ResumeCache
from vapo.runs import checkpoint_saving
from vapo.runs.checkpoints import read_checkpoint
from vapo.runs.manifests import checkpoint_name
from vapo.runs.run_dirs import RunDir
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.training.callbacks import checkpointing
from vapo.training.callbacks.checkpointing import Checkpointing
from vapo.training.callbacks.diagnostics import Evaluation
from vapo.training.module import VapoModule

WAIT_S = 60.0
write_state = checkpoint_saving._write_state
IN_BOTH_WAYS = pytest.mark.parametrize(
    "in_background", [False, True], ids=["foreground", "background"]
)


class Records(RunLogger):
    """Notes when the records are synced."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def sync(self) -> None:
        self.events.append("sync")


class FakeTrainer(L.Trainer):
    """What the callback asks of one."""

    max_epochs = 10
    should_stop = False
    global_step = 0

    def __init__(self) -> None:
        pass


class Iterations:
    """The callback between iterations of a run that learns nothing; `events` is their order."""

    def __init__(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool, **options: Any
    ) -> None:
        self.events: list[str] = []
        self.held = ""
        self.notes: list[str] = []
        self.free = threading.Event()  # set: the write may continue
        self.free.set()
        self.module = VapoModule(fit_config(tmp_path), pad_id=0)
        self.trainer = FakeTrainer()
        self.evaluation = Evaluation(Records(self.events), Progress(enabled=False))
        kept: Any = ResumeCache.__new__(ResumeCache)
        kept.forget = self._forget
        self.callback = Checkpointing(
            RunDir(tmp_path),
            Records(self.events),
            in_background=in_background,
            reason_not_to_save=lambda: self.held,
            score=self.evaluation.score_of,
            **{
                "every_n_iterations": 3,
                "keep": 2,
                "rollout_cache": kept,
                "note": self.notes.append,
                **options,
            },
        )
        self.folder = tmp_path / "checkpoints"
        monkeypatch.setattr(checkpointing, "checkpoint_state", self._state)
        monkeypatch.setattr(checkpoint_saving, "_write_state", self._write)
        self.callback.on_fit_start(self.trainer, self.module)

    def _state(self, trainer: Any) -> dict[str, Any]:
        self.events.append("state")
        weights = {"iteration": self.module.iteration, "w": torch.zeros(3)}
        return {"config": "", "state_dict": weights}

    def _write(self, *arguments: Any) -> None:
        assert self.free.wait(WAIT_S)
        write_state(*arguments)

    def _forget(self, *, first_kept: int) -> None:
        assert self.last == checkpoint_name(first_kept), "the checkpoint is in its place"
        self.events.append(f"forget {first_kept}")

    def iterate(self, score: float | None = 0.0, *, times: int = 1, updates: int = 1) -> None:
        """With a score: there was an evaluation after the updates of the policy."""
        for _ in range(times):
            self.module.iteration += 1
            self.module.policy_steps += updates
            if score is not None:
                self.evaluate(score)
            self.callback.on_train_epoch_end(self.trainer, self.module)

    def evaluate(self, score: float) -> None:
        self.evaluation.latest = {"eval/avg_at_k": score}
        self.evaluation.policy_steps = int(self.module.policy_steps)

    def end(self) -> None:
        self.callback.teardown(self.trainer, self.module, "fit")

    @property
    def last(self) -> str:
        return (self.folder / "last.ckpt").resolve().name

    @property
    def best(self) -> str:
        return (self.folder / "best.ckpt").resolve().name

    @property
    def all(self) -> list[int]:
        return sorted(int(path.name[-6:]) for path in self.folder.glob("iteration_*"))


def test_the_size_of_checkpoints_is_said_before_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(checkpointing, "expected_bytes", lambda module: 3 * 2**29)
    disk = SimpleNamespace(free=7 * 2**30)  # this machine's own may have less room
    monkeypatch.setattr(checkpoint_saving.shutil, "disk_usage", lambda folder: disk)
    Iterations(tmp_path, monkeypatch, in_background=False, keep=2, note=told.append)
    assert told == [
        "checkpoints: about 1.5 GiB each; 2 and the best are kept (checkpoints.keep), up to 6.0 "
        "GiB while one is written"
    ]
    assert shown_size(5 * 2**19) == "2.5 MiB"


@pytest.mark.parametrize(("num_bytes", "kept"), [(2**30, "2 and"), (2**30 + 1, "1 and")])
def test_of_large_checkpoints_one_is_kept_unless_the_config_says_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, kept: str
) -> None:
    told: list[str] = []
    monkeypatch.setattr(checkpointing, "expected_bytes", lambda module: num_bytes)
    disk = SimpleNamespace(free=7 * 2**30)
    monkeypatch.setattr(checkpoint_saving.shutil, "disk_usage", lambda folder: disk)
    Iterations(tmp_path, monkeypatch, in_background=False, keep=None, note=told.append)
    assert kept in told[0]


MIB = 2**20
ROLLOUTS = 164  # MiB, of an iteration: 8192 * (512 + 20 * 1024) bytes
CRITIC = "1.0 MiB for the critic after value pretraining"
IN_FOREGROUND = {"in_background": False, "every_n_iterations": 1}


@pytest.mark.parametrize(
    ("options", "missing", "needed", "fixes"),
    [
        (
            IN_FOREGROUND | {"keep": 2},
            "16.0 MiB for 4 checkpoints (newest 2, best, the one being written), "
            f"164.0 MiB for 8192 rollouts of 1024 tokens, {CRITIC}",
            4 * 4 + ROLLOUTS + 1,
            "checkpoints.keep=1, or checkpoints.keep_rollouts=false, or ",
        ),
        (
            {"in_background": True, "keep": 1, "every_n_iterations": 2},
            "12.0 MiB for 3 checkpoints (newest 1, best, the one being written), "
            f"492.0 MiB for 24576 rollouts of 1024 tokens, {CRITIC}",
            3 * 4 + 3 * ROLLOUTS + 1,
            "checkpoints.every_n_iterations=1, or checkpoints.keep_rollouts=false, or ",
        ),
        (
            IN_FOREGROUND | {"keep": 1, "rollout_cache": None},
            f"12.0 MiB for 3 checkpoints (newest 1, best, the one being written), {CRITIC}",
            3 * 4 + 1,
            "",
        ),
    ],
)
def test_a_run_that_would_fill_the_disk_is_refused_with_the_keys(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    missing: str,
    needed: int,
    fixes: str,
) -> None:
    monkeypatch.setattr(checkpointing, "expected_bytes", lambda module: 4 * MIB)
    weights = {"actor.w": torch.zeros(MIB), "critic.w": torch.zeros(MIB // 4)}
    monkeypatch.setattr(VapoModule, "named_parameters", lambda module: weights.items())
    disk = SimpleNamespace(free=(needed + 1) * MIB)  # one of them is spare
    monkeypatch.setattr(checkpoint_saving.shutil, "disk_usage", lambda folder: disk)
    Iterations(tmp_path, monkeypatch, **options)
    disk.free -= 1
    with pytest.raises(InterruptedRunError) as refused:
        Iterations(tmp_path, monkeypatch, **options)
    assert str(refused.value) == (
        f"the run cannot begin: it needs {missing}, and {tmp_path / 'checkpoints'} has "
        f"{shown_size(disk.free)} left; set {fixes}output_dir to a folder on a larger disk"
    )


def test_no_more_rollouts_are_counted_than_a_run_has_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint every 1000 iterations is one at the end of 350."""
    monkeypatch.setattr(checkpointing, "expected_bytes", lambda module: 4 * MIB)
    disk = SimpleNamespace(free=MIB)
    monkeypatch.setattr(checkpoint_saving.shutil, "disk_usage", lambda folder: disk)
    with pytest.raises(InterruptedRunError, match=f"{350 * 8192} rollouts of 1024 tokens"):
        Iterations(tmp_path, monkeypatch, in_background=False, every_n_iterations=1000, keep=2)


def test_what_a_resumed_run_has_written_needs_no_more_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "checkpoints", 1)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "of_any_iteration").write_bytes(bytes(24 * MIB))
    monkeypatch.setattr(checkpointing, "expected_bytes", lambda module: 4 * MIB)
    disk = SimpleNamespace(free=(3 * 4 + 140 + 1) * MIB)  # three checkpoints are still to come
    monkeypatch.setattr(checkpoint_saving.shutil, "disk_usage", lambda folder: disk)
    Iterations(tmp_path, monkeypatch, in_background=False, every_n_iterations=1, keep=2)
    disk.free -= 1
    with pytest.raises(InterruptedRunError, match=r"12\.0 MiB for 3 .*, 140\.0 MiB for 8192 roll"):
        Iterations(tmp_path, monkeypatch, in_background=False, every_n_iterations=1, keep=2)


@IN_BOTH_WAYS
def test_every_third_the_best_and_the_last_are_written_and_few_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    run = Iterations(tmp_path, monkeypatch, in_background, keep=2)
    wanted = {1: [1], 2: [1, 2], 3: [2, 3], 4: [2, 3], 5: [2, 3], 6: [2, 3, 6], 7: [2, 6, 7]}
    for iteration, score in enumerate([0.1, 0.3, 0.2, 0.3, 0.0, 0.1, 0.2], start=1):
        run.trainer.should_stop = iteration == 7
        run.iterate(score)
        run.callback._settle(wait=True)
        assert run.all == wanted[iteration]
        assert run.last == checkpoint_name({4: 3, 5: 3}.get(iteration, iteration))
        assert run.best == checkpoint_name(min(iteration, 2))
    run.end()
    saved = [event for event in run.events if event != "forget 0"]
    assert saved == [e for i in (1, 2, 3, 6, 7) for e in ("sync", "state", f"forget {i}")]
    contents = read_checkpoint(run.folder / "last.ckpt")["state_dict"]
    assert int(contents["iteration"]) == 7


@IN_BOTH_WAYS
def test_with_one_to_keep_the_newest_and_the_best_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    run = Iterations(tmp_path, monkeypatch, in_background, keep=1)
    wanted = {1: [1], 2: [2], 3: [2, 3], 6: [2, 6], 7: [7]}
    for iteration, score in enumerate([0.1, 0.3, 0.2, 0.3, 0.0, 0.1, 0.4], start=1):
        run.trainer.should_stop = iteration == 7
        run.iterate(score)
        run.callback._settle(wait=True)
        assert run.all == wanted.get(iteration, run.all)
    assert run.best == run.last == checkpoint_name(7)
    run.end()


@IN_BOTH_WAYS
def test_the_last_by_number_is_written_and_what_is_held_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    run = Iterations(tmp_path, monkeypatch, in_background)
    run.iterate(0.5)
    run.held = "the actor's latest update was skipped"
    run.iterate(0.9, times=4)
    run.held = ""
    run.iterate(None)
    assert run.callback.best == (0.5, 1), "what was scored better was held back, and is no more"
    run.iterate(0.6)
    run.iterate(None, times=3)
    assert run.last == checkpoint_name(10), "of max_epochs"
    assert run.events.count("state") == 5
    assert run.best == checkpoint_name(7)
    run.end()


@IN_BOTH_WAYS
def test_the_best_is_known_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    run = Iterations(tmp_path, monkeypatch, in_background)
    run.iterate(0.5)
    run.end()
    state = run.callback.state_dict()
    (run.folder / ".iteration_000002.new").mkdir()
    again = Iterations(tmp_path, monkeypatch, in_background, every_n_iterations=1)
    assert not list(run.folder.glob(".iteration_*")), "what was not finished is removed"
    again.callback.load_state_dict(state)
    again.module.iteration += 1
    again.iterate(0.4, times=4)
    again.end()
    assert again.best == checkpoint_name(1)
    assert again.all == [1, 4, 5]


@IN_BOTH_WAYS
def test_a_future_that_was_gone_back_on_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    for iteration in (1, 2, 5, 6):
        write(tmp_path / "checkpoints", iteration)
    run = Iterations(tmp_path, monkeypatch, in_background, keep=9)
    run.module.iteration += 2
    run.iterate()
    run.end()
    assert run.all == [1, 2, 3]


def test_in_the_background_nothing_is_lost_before_the_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues meanwhile; a save that is due waits for the one before."""
    run = Iterations(tmp_path, monkeypatch, True)
    run.iterate(0.5)
    run.callback._settle(wait=True)
    run.free.clear()
    run.iterate(0.0, times=4)  # the third is saved, two more go by
    assert (run.last, run.all) == (checkpoint_name(1), [1])
    assert run.events == ["sync", "state", "forget 1", "sync", "state"]
    threading.Timer(0.2, run.free.set).start()
    run.iterate(0.0)
    run.end()
    assert run.events[5:] == ["forget 3", "sync", "state", "forget 6"]
    assert int(read_checkpoint(run.folder / checkpoint_name(3))["state_dict"]["iteration"]) == 3


@pytest.mark.parametrize("is_last", [False, True], ids=["at the next iteration", "at the end"])
def test_in_the_background_an_error_is_raised_at_an_iterations_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_last: bool
) -> None:
    run = Iterations(tmp_path, monkeypatch, True)
    run.iterate(0.5)
    run.callback._settle(wait=True)

    def full(aside: Path, final: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_saving, "replace_folder", full)
    run.trainer.should_stop = is_last
    if not is_last:
        run.iterate(0.6)
        saves = run.callback._saves
        assert saves is not None
        assert saves._future is not None
        saves._future.exception(WAIT_S)
        run.held = "a watcher counts"  # and nothing is due
    with pytest.raises(InterruptedRunError, match=r"cannot write .*_000002: No space left"):
        run.iterate(0.7)
    assert run.last == checkpoint_name(1)
    assert run.all == [1]
    run.end()


def test_a_full_disk_by_whichever_library_is_no_traceback() -> None:
    def full() -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with pytest.raises(InterruptedRunError, match="cannot write it: I/O error: No space left"):
        checkpoint_saving.run_on_all_ranks(full, "cannot write it")
