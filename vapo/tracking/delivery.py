"""Ordered delivery of tracking records in the background: training never waits for a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from vapo.tracking.journal import Journal
from vapo.tracking.records import Record

_MAX_BATCH = 200
_MAX_ATTEMPTS = 20
_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
_CLOSE_S = 300.0


@runtime_checkable
class Sink(Protocol):
    """Where records go. `send` gets several records only if all of them are metrics."""

    def send(self, records: Sequence[Record]) -> None: ...

    def may_pass_later(self, error: Exception) -> bool:
        """Whether a store that answers might take the same records at another time."""
        ...

    def answers(self) -> bool:
        """Whether the store can be reached and would take records of this run."""
        ...


@dataclass(frozen=True)
class DeliveryReport:
    """`undelivered` records were not sent: they are in the journal, if it has a folder."""

    delivered: int
    undelivered: int
    refused: int
    last_error: str | None


class Delivery:
    """Sends a journal's records one after the other, in order, from a thread of its own.

    In an outage the records wait in the journal, however long it is, and are tried again after
    1, 2, 4 ... 30 s. Only a record that a store refuses while it answers is left out, at once
    or, if it might pass later, after 20 attempts, so that one bad record cannot hold up a run.
    `warn` is called when an outage begins and ends, once for the first record that is refused,
    and once when the journal cannot be written.
    """

    def __init__(
        self, sink: Sink, warn: Callable[[str], None], journal: Journal | None = None
    ) -> None:
        self._sink = sink
        self._warn_user = warn
        self._journal = Journal(None) if journal is None else journal
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._delivered = 0
        self._refused = 0
        self._attempts = 0
        self._refusals = 0
        self._singly = 0
        self._last_error: str | None = None
        self._in_outage = False
        self._warned_of_disk = False
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def submit(self, record: Record) -> None:
        with self._changed:
            if self._deadline is not None:
                raise RuntimeError("the run's tracking is closed")
            self._journal.append(record)
            self._changed.notify_all()
            trouble = self._journal.trouble
            is_news = trouble is not None and not self._warned_of_disk
            self._warned_of_disk = trouble is not None
        if is_news:
            self._warn(
                f"tracking: cannot write {trouble}; the run goes on, and its records wait in memory"
            )

    def sync(self) -> None:
        """What was submitted so far is on the disk; nothing that is sent is waited for."""
        with self._changed:
            self._journal.sync()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything was sent or refused; at once False when there is an outage."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._journal or self._attempts > 0 or not self._thread.is_alive(),
                timeout=timeout_s,
            )
            return not self._journal

    def close(self) -> DeliveryReport:
        """Send what is left, for 5 minutes at most; in an outage try only once more."""
        with self._changed:
            self._deadline = self._deadline or time.monotonic() + _CLOSE_S
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            self._journal.retry_disk()
            return DeliveryReport(
                self._delivered, len(self._journal), self._refused, self._last_error
            )

    def _work(self) -> None:
        while batch := self._next_batch():
            deadline = self._deadline
            error, answers = self._try([record for record in batch if record is not None])
            with self._changed:
                self._settle(batch, error, answers)
                self._changed.notify_all()
                if deadline and (self._attempts or time.monotonic() > deadline):
                    return
                if self._attempts and not deadline:
                    self._journal.sync()
                    wait_s = min(
                        _FIRST_RETRY_S * 2 ** min(self._attempts - 1, 10), _LONGEST_RETRY_S
                    )
                    self._changed.wait_for(lambda: self._deadline is not None, timeout=wait_s)

    def _next_batch(self) -> list[Record | None]:
        """The first record, with the metrics that follow if it is metrics; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._journal or self._deadline is not None)
            self._journal.retry_disk()
            batch: list[Record | None] = []
            for record in self._journal.peek(1 if self._singly else _MAX_BATCH):
                is_metrics = record is not None and record.kind == "metrics"
                if batch and not is_metrics:
                    break
                batch.append(record)
                if not is_metrics:
                    break
            return batch

    def _try(self, records: list[Record]) -> tuple[Exception | None, bool]:
        """What went wrong, and whether the store answers."""
        try:
            if not records:
                raise ValueError("the journal's line is damaged")
            self._sink.send(records)
        except Exception as error:
            return error, self._sink.answers()
        return None, True

    def _settle(self, batch: list[Record | None], error: Exception | None, answers: bool) -> None:
        """Take sent or refused records off the journal; leave the others for another attempt."""
        if error is None:
            self._delivered += len(batch)
            self._singly = max(0, self._singly - len(batch))
            self._attempts = self._refusals = 0
            self._journal.settle(len(batch))
            if self._in_outage:
                self._in_outage = False
                self._warn("tracking: the store takes records again")
            return
        self._last_error = _one_line(error)
        if not answers:
            self._attempts += 1
            if not self._in_outage:
                self._in_outage = True
                self._warn(
                    f"tracking: the store does not take records ({self._last_error}); "
                    "the run goes on, and they are sent again later"
                )
            return
        if self._sink.may_pass_later(error) and self._refusals + 1 < _MAX_ATTEMPTS:
            self._attempts += 1
            self._refusals += 1
            return
        self._refuse(batch)

    def _refuse(self, batch: list[Record | None]) -> None:
        """Of several records each is tried alone; one goes to the journal's refused records."""
        self._attempts = self._refusals = 0
        if len(batch) > 1:
            self._singly = len(batch)
            return
        self._singly = max(0, self._singly - 1)
        self._refused += 1
        self._journal.settle(1, refused_for=self._last_error)
        if self._refused == 1:
            what = f"{batch[0].kind} {batch[0].name}".strip() if batch[0] else "unknown kind"
            self._warn(
                f"tracking: the store refused a record of {what} ({self._last_error}); "
                "the run goes on without it"
            )

    def _warn(self, text: str) -> None:
        with suppress(Exception):  # a closed terminal must not end the delivery
            self._warn_user(text)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
