"""Lets one process of a user's code answer several questions at a time, for code that mostly waits.

Each question has a thread. Answers are written in the order of the questions, as the trainer
expects them. A question that takes too long is answered with `timeout`, and the others go on.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

_lock = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []


def answer_concurrently(
    reply: Callable[[Any], dict[str, Any]],
    channel: Connection,
    write: Callable[[str, dict[str, Any]], None],
    *,
    timeout_s: float,
) -> None:
    """Answer each `(ticket, question)` of a channel in its own thread, until the trainer closes it.

    Args:
        reply: returns the fields of a question's answer, and never raises.
        channel: the connection on which questions come.
        write: sends an answer with its ticket.
        timeout_s: a question that has run this long is answered with the failure `timeout`. Its
            thread goes on, because no thread can be ended.
    """
    waiting: SimpleQueue[tuple[str, float, Future[dict[str, Any]]]] = SimpleQueue()

    def write_in_order() -> None:
        with suppress(OSError):  # nobody reads any more: the process ends
            while True:
                ticket, deadline, future = waiting.get()
                try:
                    fields = future.result(max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    fields = {"failure": "timeout"}
                write(ticket, fields)

    threading.Thread(target=write_in_order, daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            ticket, question = channel.recv()
            future: Future[dict[str, Any]] = Future()
            waiting.put((ticket, time.monotonic() + timeout_s, future))
            threading.Thread(
                target=lambda f=future, q=question: f.set_result(reply(q)), daemon=True
            ).start()


def awaited(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that a coroutine which it returns is awaited, and its result returned.

    Any other result is returned unchanged. All coroutines of a process run in one event loop, so
    that they may share a client. A coroutine runs on until it ends, even if its question has been
    answered with `timeout`.
    """

    @functools.wraps(function, updated=())
    def waits(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not inspect.iscoroutine(result):
            return result
        return asyncio.run_coroutine_threadsafe(result, _event_loop()).result()

    return waits


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process. The first call starts it in a thread of its own."""
    with _lock:
        if not _loops:
            loop = asyncio.new_event_loop()
            threading.Thread(target=_run_on, args=(loop,), daemon=True).start()
            _loops.append(loop)
    return _loops[0]


def _run_on(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop in this thread until it is closed.

    If a coroutine exits, interrupts or stops the loop, it is run again for the other coroutines.
    """
    while not loop.is_closed():
        with suppress(BaseException):  # its own caller hears of it, too
            loop.run_forever()
