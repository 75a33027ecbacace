"""Ordered delivery of tracking records in the background: training never waits for a store.

Records are plain data, so that a later stage can keep them on disk instead of in memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol, runtime_checkable

_MAX_BATCH = 200
_MAX_ATTEMPTS = 20
_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0


@dataclass(frozen=True)
class Record:
    """One thing to record. `payload` by kind:

    metrics: list of (key, value, unix time in ms, step); params, tags: dict of strings;
    text: str; bytes: bytes; file: path of a local file (read when delivered);
    inputs: list of `InputData`. `name` is the artifact's path for text, bytes and file.
    """

    kind: Literal["metrics", "params", "tags", "text", "bytes", "file", "inputs"]
    payload: Any
    name: str = ""


@dataclass(frozen=True)
class InputData:
    """A data set that a run reads: `context` is `training` or `evaluation`."""

    name: str
    context: str
    digest: str
    num_rows: int
    source: str


@runtime_checkable
class Sink(Protocol):
    """Where records go. `send` gets several records only if all of them are metrics."""

    def send(self, records: Sequence[Record]) -> None: ...

    def is_outage(self, error: Exception) -> bool:
        """Whether the same records may pass later; otherwise they are dropped and counted."""
        ...


@dataclass(frozen=True)
class DeliveryReport:
    delivered: int
    undelivered: int
    last_error: str | None


class Delivery:
    """Sends records one after the other, in the order of `submit`, from a thread of its own.

    In an outage the records stay in memory and are tried again after 1, 2, 4 ... 30 s; a record
    that failed 20 times is dropped, so that one bad record cannot hold up a run. `warn` is
    called once when an outage begins, and once for the first record that is dropped.
    """

    def __init__(self, sink: Sink, warn: Callable[[str], None]) -> None:
        self._sink = sink
        self._warn_user = warn
        self._queue: deque[Record] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._delivered = 0
        self._dropped = 0
        self._attempts = 0
        self._singly = 0
        self._last_error: str | None = None
        self._warned_outage = False
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def submit(self, record: Record) -> None:
        with self._changed:
            if self._closing:
                raise RuntimeError("the run's tracking is closed")
            self._queue.append(record)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything was sent or dropped; at once False when there is an outage."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._queue or self._attempts > 0 or not self._thread.is_alive(),
                timeout=timeout_s,
            )
            return not self._queue

    def close(self) -> DeliveryReport:
        """Send what is left; in an outage try once more, then count the rest as undelivered."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        return DeliveryReport(self._delivered, self._dropped, self._last_error)

    def _work(self) -> None:
        while batch := self._next_batch():
            was_closing = self._closing
            error = self._try(batch)
            with self._changed:
                self._settle(batch, error)
                if self._attempts and was_closing:
                    self._dropped += len(self._queue)
                    self._queue.clear()
                self._changed.notify_all()
                if self._attempts and not was_closing:
                    wait_s = min(_FIRST_RETRY_S * 2 ** (self._attempts - 1), _LONGEST_RETRY_S)
                    self._changed.wait_for(lambda: self._closing, timeout=wait_s)

    def _next_batch(self) -> list[Record]:
        """The first record, with the metrics that follow if it is metrics; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            batch: list[Record] = []
            limit = 1 if self._singly else _MAX_BATCH
            for record in islice(self._queue, limit):
                if batch and record.kind != "metrics":
                    break
                batch.append(record)
                if record.kind != "metrics":
                    break
            return batch

    def _try(self, batch: list[Record]) -> Exception | None:
        try:
            self._sink.send(batch)
        except Exception as error:
            return error
        return None

    def _settle(self, batch: list[Record], error: Exception | None) -> None:
        """Take sent or hopeless records off the queue; leave the others for another attempt."""
        if error is None:
            self._delivered += len(batch)
            self._singly = max(0, self._singly - len(batch))
            self._attempts = 0
        else:
            self._last_error = _one_line(error)
            if self._sink.is_outage(error) and self._attempts + 1 < _MAX_ATTEMPTS:
                self._attempts += 1
                if not self._warned_outage:
                    self._warned_outage = True
                    self._warn(
                        f"tracking: the store does not take records ({self._last_error}); "
                        "the run goes on, and they are sent again later"
                    )
                return
            self._attempts = 0
            if len(batch) > 1:
                self._singly = len(batch)
                return
            self._singly = max(0, self._singly - 1)
            self._dropped += 1
            if self._dropped == 1:
                self._warn(
                    f"tracking: the store refused a record of {batch[0].kind} "
                    f"{batch[0].name} ({self._last_error}); the run goes on without it"
                )
        for _ in batch:
            self._queue.popleft()

    def _warn(self, text: str) -> None:
        with suppress(Exception):  # a closed terminal must not end the delivery
            self._warn_user(text)


def now_ms() -> int:
    return int(time.time() * 1000)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
