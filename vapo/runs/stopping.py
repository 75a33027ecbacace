"""Stops a run: when a signal asks for it, and when another process of the run is lost.

Signals are SIGTERM, SIGHUP (a closed terminal), SIGUSR1 and Ctrl-C. A handler only takes note; the
run stops at its next safe point, where all processes agree. Nothing is written then: the last
checkpoint and the iteration's rollouts are on the disk already. If no safe point comes in time, the
process is ended, which loses nothing either.

A process whose peer is lost reports that and ends, instead of waiting. This concerns processes
that Lightning starts: under torchrun and srun the launcher ends the others.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import psutil
import torch

from vapo.errors import InterruptedRunError, StopRequested, UserError
from vapo.runs.resuming import how_to_resume
from vapo.runs.run_dirs import RunDir
from vapo.system.distributed import leave_together, max_over_ranks, world_size
from vapo.system.process import ending_signals, is_main_process, kill_started_by

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_POLL_S = 0.5
_ORDERLY_S = 10.0
HOW_TO_RESUME = "the last checkpoint is whole: resume with --ckpt_path last"
_BROKEN = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|remote process exited"
    r"|nccl|gloo",
    re.IGNORECASE,
)


class Stopping:
    """A context in which signals ask the run to stop. Outside the main thread it does nothing.

    `requested` is the number of the signal, or None. `grace_s` is the time in seconds after which
    the process is ended if no safe point came.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.requested: int | None = None
        self._signal_handlers = ExitStack()
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Stopping:
        self._signal_handlers.enter_context(ending_signals(self._take, SIGNALS))
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._signal_handlers.close()

    def safe_point(self) -> None:
        """Stop the run here if any process was asked to stop. Every process must call this.

        Raises: StopRequested: a process was asked to stop.
        """
        number = int(max_over_ranks(torch.tensor(self.requested or 0)))
        if number:
            self.requested = number
            leave_together()
            raise StopRequested(number)

    def poll(self) -> None:
        """Stop the run here if it has a single process, which was asked to stop.

        Raises: StopRequested: it was asked to stop.
        """
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self.requested and world_size() == 1 and in_main_thread:
            raise StopRequested(self.requested)

    def _take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: note it, start the timer that ends the process if no safe point comes.

        A second Ctrl-C ends the process at once.
        """
        name = signal.Signals(number).name
        if self.requested is not None:
            if number == signal.SIGINT:
                end_now(f"{name} again: ending at once", 128 + number)
            return
        self.requested = number
        again = "; again: at once" if number == signal.SIGINT else ""
        say_in_handler(f"{name}: stopping at the next safe point, within {self.grace_s:g} s{again}")
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


def say_in_handler(text: str) -> None:
    """Write a line to stderr past its buffer, whose writing a signal may have interrupted."""
    os.write(2, f"vapo: {text}\n".encode())


def end_now(reason: str, exit_code: int) -> None:
    """End this process and all that it started at once, without any clean-up."""
    say_in_handler(reason)
    kill_started_by(psutil.Process())
    os._exit(exit_code)


class Peers:
    """Watches the other processes of a run, and ends this one clearly if one of them is lost.

    The process that started the others watches them; each of the others watches the first. It
    replaces Lightning's own observer, which looks every five seconds and kills the first process
    without a message.
    """

    def __init__(self) -> None:
        self.lost_process: str | None = None
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, children: list[subprocess.Popen[bytes]]) -> None:
        """Begin to watch the other processes. `children` is the launcher's list, which is emptied,
        so that Lightning does not watch them."""
        self._children = list(children)
        children.clear()
        # not under torchrun or srun, which end the others themselves
        external = {"TORCHELASTIC_RUN_ID", "SLURM_PROCID"} & os.environ.keys()
        self._parent = None if is_main_process() or external else os.getppid()
        if self._children or self._parent is not None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching, because from now on the other processes may end."""
        self._is_closed.set()

    @contextmanager
    def ends_clearly(self, run_dir: RunDir) -> Iterator[None]:
        """Add to errors in this block how to resume the run, and say if a process was lost."""
        try:
            yield
        except (StopRequested, SystemExit) as stop:
            # Lightning turns an interrupt, which a sampling engine may raise, into an exit
            stopped = stop if isinstance(stop, StopRequested) else StopRequested(signal.SIGINT)
            stopped.how_to_resume = how_to_resume(run_dir)
            raise stopped from None
        except UserError:
            self.close()  # all processes have this error, and end
            raise
        except RuntimeError as error:
            if (lost_error := self.explain(error)) is None:
                raise
            raise lost_error from error
        finally:
            if self.lost_process is None:
                self.close()

    def explain(self, error: BaseException) -> InterruptedRunError | None:
        """Return a clear error if `error` is a broken connection to a lost process, else None."""
        if not _BROKEN.search(str(error)):
            return None
        deadline = time.monotonic() + _ORDERLY_S / 2
        while (
            self._thread is not None and self.lost_process is None and time.monotonic() < deadline
        ):
            time.sleep(_POLL_S / 5)
        reason = (
            self.lost_process
            or "another process of this run has ended (its own last lines say why)"
        )
        return InterruptedRunError(f"{reason}; {HOW_TO_RESUME}")

    def _watch(self) -> None:
        while self.lost_process is None:
            if self._is_closed.wait(_POLL_S):
                return
            self.lost_process = self._find_lost()
        # a collective that waits for the lost process may fail by itself, which ends the run in
        # good order; sampling or a hung collective does not
        if not self._is_closed.wait(_ORDERLY_S):
            end_now(f"{self.lost_process}; {HOW_TO_RESUME}", InterruptedRunError.exit_code)

    def _find_lost(self) -> str | None:
        for rank, child in enumerate(self._children, start=1):
            if code := child.poll():
                end = f"signal {-code}" if code < 0 else f"exit code {code}"
                return f"process {rank} of this run has ended ({end})"
        if self._parent is not None and os.getppid() != self._parent:
            return "process 0 of this run has ended"
        return None
