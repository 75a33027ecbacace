"""A save in a thread: of a copy that training does not reach, one at a time, its error not lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.runs.comparing import assert_same
from tests.runs.test_checkpointing import Iterations, Records
from vapo.errors import InterruptedRunError
from vapo.runs.checkpoint_saving import BackgroundSaves, write_checkpoint
from vapo.runs.checkpoints import read_checkpoint
from vapo.runs.manifests import Manifest, read_manifest
from vapo.runs.run_dirs import RunDir
from vapo.training.callbacks.checkpointing import Checkpointing

MANIFEST = Manifest(1, 2, "policy_optimization", "abc", {"w": "float32 [2]"}, {})
WAIT_S = 60.0


class Tied(nn.Module):
    """One tensor under two names, as embeddings and output layer are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.second = nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


class Run:
    """A network in training, and its state as a Trainer collects it: the live tensors."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = Tied()
        self.optimizer = torch.optim.AdamW(self.network.parameters())
        self.history: dict[str, Any] = {"losses": [1.0]}

    def step(self) -> None:
        self.network.first(torch.ones(2, 64)).sum().backward()
        self.optimizer.step()
        self.network.get_buffer("count").add_(1)
        self.history["losses"].append(2.0)

    def state(self) -> dict[str, Any]:
        return {
            "config": "seed: 0\n",
            "state_dict": self.network.state_dict(),
            "optimizer_states": [self.optimizer.state_dict()],
            "callbacks": self.history,
        }


def write(state: dict[str, Any], final: Path) -> Manifest:
    return write_checkpoint(state, final, MANIFEST, sharded=False, expected=0)


def saved_while_training(run: Run, saves: BackgroundSaves, final: Path) -> None:
    """The save begins, training takes a step, and only then anything is written."""
    may_write = threading.Event()

    def held(state: dict[str, Any]) -> Manifest:
        assert may_write.wait(WAIT_S)
        return write(state, final)

    saves.start(run.state(), held)
    assert saves.finish_pending(wait=False) is None, "it has not ended"
    run.step()
    may_write.set()
    assert saves.finish_pending(wait=True) == read_manifest(final)
    assert saves.finish_pending(wait=True) is None, "taken once"


def test_what_is_written_is_the_state_as_it_was(tmp_path: Path) -> None:
    """And in as many bytes as without the thread, twice: the buffers are used again."""
    run, saves = Run(), BackgroundSaves()
    run.step()
    for name in ("first", "second"):
        expected = write(run.state(), tmp_path / f"{name}_foreground")
        saved_while_training(run, saves, tmp_path / name)
        assert_same(
            read_checkpoint(tmp_path / name), read_checkpoint(tmp_path / f"{name}_foreground")
        )
        assert read_manifest(tmp_path / name).num_bytes == expected.num_bytes
    assert saves.drain() is None


def test_without_the_copy_later_updates_are_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, saves = Run(), BackgroundSaves()
    run.step()
    write(run.state(), tmp_path / "foreground")
    monkeypatch.setattr(saves._stager, "stage", lambda state: state)
    saved_while_training(run, saves, tmp_path / "background")
    contents = [read_checkpoint(tmp_path / n) for n in ("background", "foreground")]
    for part in ("state_dict", "optimizer_states", "callbacks"):
        with pytest.raises(AssertionError):
            assert_same(contents[0][part], contents[1][part])


@pytest.mark.parametrize(
    ("on_gpu", "free", "is_background", "said"),
    [
        (True, 2 * 11 * 2**30, True, "; training waits only for a copy of each in host memory"),
        (True, 2 * 11 * 2**30 - 1, False, "; training waits for each: a copy would take more"),
        (False, 2**50, False, ""),
    ],
    ids=["a GPU", "too little memory", "a CPU"],
)
def test_left_open_it_is_in_the_background_on_a_gpu_whose_host_has_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_gpu: bool,
    free: int,
    is_background: bool,
    said: str,
) -> None:
    """A checkpoint of 11 GiB; the copy may take half of what the host has free."""
    monkeypatch.setattr("vapo.runs.checkpoint_saving.available_memory", lambda: free)
    for chosen, expected in ((None, is_background), (True, True), (False, False)):
        callback = Checkpointing(
            RunDir(tmp_path), Records([]), 1, 1, lambda module: 0.0, in_background=chosen
        )
        callback._num_bytes = 11 * 2**30
        line = callback._choose_background(on_gpu=on_gpu)
        assert callback.in_background is expected
        assert line.startswith(said if chosen is None else "; training waits only" * expected)
        assert bool(line) == (bool(said) if chosen is None else expected)


def test_a_run_waits_for_the_copy_and_not_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk does not go on before the next iteration, whose end waits for it."""
    seconds: list[tuple[str, float]] = []
    run = Iterations(
        tmp_path,
        monkeypatch,
        in_background=True,
        every_n_iterations=1,
        add_seconds=lambda name, s: seconds.append((name, s)),
    )
    copy_s = 0.05
    stage = run.callback._saves._stager.stage  # type: ignore[union-attr]

    def slow_stage(state: Any) -> Any:
        time.sleep(copy_s)
        return stage(state)

    monkeypatch.setattr(run.callback._saves._stager, "stage", slow_stage)  # type: ignore[union-attr]
    run.free.clear()
    run.iterate()
    assert not run.all, "it is not written yet"
    threading.Timer(0.3, run.free.set).start()
    run.iterate()
    run.end()
    assert run.all == [1, 2]
    assert [name for name, _ in seconds] == ["checkpoint", "checkpoint"]
    assert copy_s <= seconds[0][1] < 0.25 < seconds[1][1]


@pytest.mark.parametrize("number", [0, 1])
def test_only_the_process_that_writes_copies_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A host with eight GPUs would hold eight copies."""
    run = Iterations(tmp_path, monkeypatch, in_background=True, every_n_iterations=1)
    staged: list[Any] = []
    stage = run.callback._saves._stager.stage  # type: ignore[union-attr]

    def noted(state: Any) -> Any:
        staged.append(state)
        return stage(state)

    monkeypatch.setattr(run.callback._saves._stager, "stage", noted)  # type: ignore[union-attr]
    monkeypatch.setattr("vapo.training.callbacks.checkpointing.rank", lambda: number)
    monkeypatch.setattr(
        "vapo.training.callbacks.checkpointing.checkpoint_state", lambda trainer: {"weights": 1}
    )
    run.iterate()
    run.end()
    assert staged == [{"weights": 1} if number == 0 else {}]


def failing(error: BaseException) -> Callable[[dict[str, Any]], Manifest]:
    def write(state: dict[str, Any]) -> Manifest:
        raise error

    return write


def test_one_at_a_time_and_an_error_is_raised_once() -> None:
    saves = BackgroundSaves()
    saves.start({}, failing(InterruptedRunError("no room")))
    with pytest.raises(RuntimeError, match="has not been finished"):
        saves.start({}, lambda state: MANIFEST)
    with pytest.raises(InterruptedRunError, match="no room"):
        saves.finish_pending(wait=True)
    assert saves.finish_pending(wait=True) is None
    saves.start({}, lambda state: MANIFEST)
    assert saves.finish_pending(wait=True) is MANIFEST
    saves.start({}, failing(InterruptedRunError("no room either")))
    assert str(saves.drain()) == "no room either"
