"""Ends a wait for an engine that hangs."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import TracebackType
from typing import Any

from vapo.errors.shown_text import say
from vapo.rollouts.engines.engine import RESUME_HINT, EngineError

_GRACE_S = 30.0


class Watchdog:
    """A context that ends a vLLM call which hangs: one without a `heartbeat()` for `timeout_s`.

    The block's thread is then interrupted, and the block ends in an `EngineError`. A run's own
    handler of interrupts only records them, so it is replaced inside the block. A thread that does
    not return from native code within `grace_s` more seconds (a collective that waits for a dead
    rank) cannot be interrupted: the process is ended, as nothing else would end it.
    """

    def __init__(self, timeout_s: float, *, grace_s: float = _GRACE_S) -> None:
        self._timeout_s, self._grace_s = timeout_s, grace_s
        self._fired = False
        self._handler: Any = None
        self._has_ended = threading.Event()
        self._last = time.monotonic()
        self._watched = threading.current_thread()
        self._thread = threading.Thread(target=self._watch, name="vllm-watchdog", daemon=True)

    def heartbeat(self) -> None:
        self._last = time.monotonic()

    def __enter__(self) -> Watchdog:
        self.heartbeat()
        if self._watched is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        try:
            self._end()
        except KeyboardInterrupt:
            if not self._fired:
                raise
            self._end()  # the signal came when the block had ended: nothing hung
        if self._fired and kind is KeyboardInterrupt:
            raise EngineError(self._message()) from None

    def _end(self) -> None:
        """Join the watching thread, so that it interrupts nothing more, and restore the handler of
        interrupts."""
        self._thread.join()
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    def _message(self) -> str:
        return (
            f"the vLLM engine has given no token for {self._timeout_s:g} s "
            f"(rollouts.vllm.timeout_s) and counts as hung; {RESUME_HINT}"
        )

    def _watch(self) -> None:
        while not self._has_ended.wait(max(self._last + self._timeout_s - time.monotonic(), 0.01)):
            if time.monotonic() - self._last >= self._timeout_s:
                break
        if self._has_ended.is_set():
            return
        self._fired = True
        assert self._watched.ident is not None
        signal.pthread_kill(self._watched.ident, signal.SIGINT)
        if not self._has_ended.wait(self._grace_s):
            say(f"vapo: {self._message()}", file=sys.stderr)
            os._exit(2)
