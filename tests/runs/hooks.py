"""What happens to a run from inside: killed, slowed or robbed of its disk at a chosen point."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(place: str, count: str) -> None:
    """SIGKILL when a function is entered for the `count`-th time; see `PLACES`."""
    _nth(place, int(count), kill)


def signal_at(place: str, count: str, name: str) -> None:
    _nth(place, int(count), lambda: os.kill(os.getpid(), getattr(signal, name)))


def slowed_at(place: str, count: str, seconds: str) -> None:
    _nth(place, int(count), lambda: time.sleep(float(seconds)))


def full_disk_at(place: str, count: str) -> None:
    _nth(place, int(count), full)


def full() -> None:
    raise OSError(28, "No space left on device")


def held_until(place: str, count: str, until: str, until_count: str, action: str) -> None:
    """A step of a save, in its thread, waits until training is at another place.

    There comes SIGKILL, or a signal whose save then continues; `full disk` is SIGTERM and a save
    that fails.
    """
    reached = threading.Event()

    def arrive() -> None:
        name = "SIGTERM" if action == "full disk" else action
        if name != "continue":
            os.kill(os.getpid(), getattr(signal, name))
        reached.set()

    def wait() -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert reached.wait(120)
        if action == "full disk":
            full()

    _nth(until, int(until_count), arrive)
    _nth(place, int(count), wait)


def _nth(place: str, count: int, action: Callable[[], None]) -> None:
    owner, name = _find(place)
    inner, calls = getattr(owner, name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            action()
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def _find(place: str) -> tuple[Any, str]:
    import torch

    from vapo.files import whole_files as durable
    from vapo.rollouts.collection import RolloutCollection
    from vapo.rollouts.kept_rollouts import ResumeCache
    from vapo.runs import checkpoint_saving, manifests
    from vapo.training.callbacks.checkpointing import Checkpointing
    from vapo.training.iteration import IterationRunner
    from vapo.training.module import VapoModule

    places: dict[str, tuple[Any, str]] = {
        "sampling": (RolloutCollection, "sample_groups"),
        "keeping": (ResumeCache, "write"),
        "kept": (VapoModule, "add_logprobs_and_values"),
        "minibatch": (VapoModule, "training_step"),
        "torch.save": (torch, "save"),
        "manifest": (manifests.Manifest, "write"),
        "renaming": (checkpoint_saving, "replace_folder"),
        "linking": (Checkpointing, "_tidy"),
        "forgetting": (ResumeCache, "forget"),
        "collect": (IterationRunner, "run"),
        "sync": (durable, "sync"),
    }
    return places[place]


def traced(path: str, seconds: str) -> None:
    """Say in a file where the run is; every step of a save takes long, so that kills hit some."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)

    def say(place: str) -> None:
        os.pwrite(file, place.ljust(20).encode(), 0)

    say("starting")
    saving = ("torch.save", "manifest", "renaming", "linking", "forgetting", "keeping")
    for place in (*saving, "sampling", "kept", "minibatch"):
        owner, name = _find(place)
        pause = float(seconds) if place in saving else 0.0
        setattr(owner, name, _traced(getattr(owner, name), place, pause, say))


def _traced(
    inner: Callable[..., Any], place: str, pause: float, say: Callable[[str], None]
) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        say(place)
        time.sleep(pause)
        try:
            return inner(*args, **kwargs)
        finally:
            time.sleep(pause)
            say("between stages")

    return wrapped


def dump_before_rollouts(path: str) -> None:
    """Write what has been restored to one file, and end before the first rollout."""
    from vapo.training.module import VapoModule

    def save_and_exit(self: Any) -> None:
        self.trainer.save_checkpoint(path)
        os._exit(0)

    VapoModule.on_train_epoch_start = save_and_exit  # type: ignore[method-assign]
