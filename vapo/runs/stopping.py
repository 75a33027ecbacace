"""Signals that ask a run to stop: SIGTERM, SIGHUP (a closed terminal), SIGUSR1, Ctrl-C.

A handler only takes note; the run stops at its next safe point, where all processes agree.
Nothing is written then: the last checkpoint and the iteration's rollouts are on the disk
already. If no safe point comes in time, the process is ended, which loses nothing either.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from types import FrameType

import psutil
import torch

from vapo.errors import StopRequested
from vapo.system.distributed import leave_together, max_over_ranks, world_size
from vapo.system.signals import ending_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Stopping:
    """A `with` block in which the signals are taken. Outside the main thread it does nothing."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.requested: int | None = None
        self._taken = ExitStack()
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Stopping:
        self._taken.enter_context(ending_signals(self._take, SIGNALS))
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._taken.close()

    def safe_point(self) -> None:
        """Stop here if any process was asked to; every process must come by.

        Raises: StopRequested
        """
        number = int(max_over_ranks(torch.tensor(self.requested or 0)))
        if number:
            self.requested = number
            leave_together()
            raise StopRequested(number)

    def poll(self) -> None:
        """As `safe_point`, for one process alone; with several nothing happens.

        Raises: StopRequested
        """
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self.requested and world_size() == 1 and in_main_thread:
            raise StopRequested(self.requested)

    def _take(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested is not None:
            if number == signal.SIGINT:
                end_now(f"{name} again: ending at once", 128 + number)
            return
        self.requested = number
        again = "; again: at once" if number == signal.SIGINT else ""
        say(f"{name}: stopping at the next safe point, within {self.grace_s:g} s{again}")
        self._timer = threading.Timer(
            self.grace_s,
            end_now,
            (
                f"{name}: no safe point within {self.grace_s:g} s, ending; resume with "
                "--ckpt_path last or checkpoints.resume=auto",
                128 + number,
            ),
        )
        self._timer.daemon = True
        self._timer.start()


def say(text: str) -> None:
    """To stderr, past its buffer: a signal handler may interrupt a write to it."""
    os.write(2, f"vapo: {text}\n".encode())


def end_now(reason: str, exit_code: int) -> None:
    """End this process and those that it started, without any clean-up."""
    say(reason)
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(exit_code)
