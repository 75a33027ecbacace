"""Ordered delivery of tracking records in the background: training never waits for a store."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from vapo.tracking.journal import Journal
from vapo.tracking.records import Record

_MAX_BATCH = 200
_MAX_ATTEMPTS = 20
_MAX_ATTEMPTS_AT_CLOSE = 3
_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
_CLOSE_S = 120.0


class OutageError(Exception):
    """The store is at fault and not the record: it takes none, or nobody knows whether it does."""


@runtime_checkable
class Sink(Protocol):
    """Where records go. `send` gets several records only if all of them are metrics."""

    def send(self, records: Sequence[Record]) -> None: ...

    def may_pass_later(self, error: Exception) -> bool:
        """Whether a store that answers might take the same records at another time."""
        ...

    def answers(self) -> bool:
        """Whether the store can be reached and has this run, to be written to."""
        ...


class Outcome(Enum):
    """What came of one attempt."""

    SENT = "sent"
    REFUSED = "refused"  # for what is in the record
    OUTAGE = "outage"  # the store takes no records
    UNCLEAR = "unclear"  # the store answers, and may be full, or dislike this record


@dataclass(frozen=True)
class DeliveryReport:
    """`undelivered` records were not sent; `lost` of them are not on disk either."""

    delivered: int
    undelivered: int
    refused: int
    last_error: str | None
    lost: int = 0


class Delivery:
    """Sends a journal's records one after the other, in order, from a thread of its own.

    In an outage the records wait in the journal, however long it is, and are tried again after
    1, 2, 4 ... 30 s. That is also what every error means that the store does not clearly blame on
    the record. Only a record that the store finds invalid, or one that fails 20 times and once
    more after the store has taken a later one, is left out: it cannot hold up a run. An error of
    the journal itself is an outage too. `warn` is called when an outage begins and ends, once for
    the first record that is refused, and once when the journal cannot be written. `redact` takes
    the store's credentials out of the errors, which are shown and written.
    """

    def __init__(
        self,
        sink: Sink,
        warn: Callable[[str], None],
        journal: Journal | None = None,
        *,
        redact: Callable[[str], str] = str,
    ) -> None:
        self._sink = sink
        self._redact = redact
        self._warn_user = warn
        self._journal = Journal(None) if journal is None else journal
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._close_s = _CLOSE_S
        self._patient = self._ended = self._abandoned = False
        self._delivered = 0
        self._refused = 0
        self._attempts = 0
        self._unclear = 0
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
            if not self._changed.wait_for(
                lambda: not self._journal or self._attempts > 0 or self._ended, timeout_s
            ):  # a store that hangs: the end of the run has one deadline for all its waits
                self._close_s = max(self._close_s - timeout_s, _CLOSE_S / 10)
            return not self._journal

    def close(self, *, while_it_moves: bool = False) -> DeliveryReport:
        """Send what is left, within 2 minutes in all; in an outage try only once more.

        `while_it_moves`: 2 minutes for each success. An attempt that has not come to an end by
        then is abandoned: its thread cannot be ended, but touches the journal no more, and does
        not keep the process from its end.
        """
        with self._changed:
            self._patient = while_it_moves
            if self._deadline is None:
                self._deadline = time.monotonic() + self._close_s
            self._changed.notify_all()
            while not self._ended and (left_s := self._deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)
            if not self._ended and not self._abandoned:
                self._last_error = f"an attempt did not come to an end within {self._close_s:g} s"
            self._abandoned = True
            self._journal.retry_disk()
            left, lost = len(self._journal), self._journal.num_in_process
            return DeliveryReport(self._delivered, left, self._refused, self._last_error, lost)

    def _work(self) -> None:
        try:
            while self._attempt():
                pass
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _attempt(self) -> bool:
        """One attempt, and the wait after a failure; whether there may be another one."""
        try:
            batch = self._next_batch()
            if not batch:
                return False
            outcome = self._try(batch)
            with self._changed:
                if self._abandoned:
                    return False
                self._settle(batch, outcome)
        except OSError as error:  # the journal's: what a sink raises is an outcome
            outcome = Outcome.OUTAGE
            with self._changed:
                self._last_error = self._redact(_one_line(error))
                self._failed(outcome, "the run's journal cannot be used")
        with self._changed:
            self._changed.notify_all()
            closing = self._deadline is not None
            if closing and outcome is Outcome.OUTAGE:
                return False
            if self._attempts:
                self._journal.sync()
                wait_s = min(_FIRST_RETRY_S * 2 ** min(self._attempts - 1, 10), _LONGEST_RETRY_S)
                self._changed.wait_for(
                    lambda: self._abandoned or (self._deadline is not None) != closing, wait_s
                )
        return True

    def _next_batch(self) -> list[Record | None]:
        """The first record, with the metrics that follow if it is metrics; empty at the end.

        Raises: OSError when the journal cannot be read.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._journal or self._deadline is not None)
            if self._abandoned:
                return []
            self._journal.retry_disk()
            batch: list[Record | None] = []
            for record in self._journal.peek(1 if self._singly else _MAX_BATCH):
                is_metrics = record is not None and record.kind == "metrics"
                if batch and not is_metrics:
                    break
                batch.append(record)
                if not is_metrics:
                    break
            if self._journal and not batch:
                raise OSError("it was cut short by another process")
            return batch

    def _try(self, batch: list[Record | None]) -> Outcome:
        """Send; if that fails again and again, find out whether it is this record's fault."""
        records = [record for record in batch if record is not None]
        if len(records) < len(batch):
            self._last_error = "its line in the journal is damaged, or its file is gone"
            return Outcome.REFUSED
        outcome = self._send(records)
        closing = self._deadline is not None
        limit = min(_MAX_ATTEMPTS, _MAX_ATTEMPTS_AT_CLOSE) if closing else _MAX_ATTEMPTS
        if outcome is not Outcome.UNCLEAR or self._unclear + 1 < limit:
            return outcome
        if len(records) > 1:
            return Outcome.REFUSED  # to be tried one by one
        later = self._later_than(records[0])
        if later is None or self._send([later]) is not Outcome.SENT:
            return Outcome.OUTAGE
        again = self._send(records)
        return Outcome.REFUSED if again is Outcome.UNCLEAR else again

    def _send(self, records: list[Record]) -> Outcome:
        try:
            self._sink.send(records)
        except Exception as error:
            self._last_error = self._redact(_one_line(error))
            if isinstance(error, OutageError) or not self._sink.answers():
                return Outcome.OUTAGE
            may_pass = self._sink.may_pass_later(error)
            return Outcome.UNCLEAR if may_pass else Outcome.REFUSED
        return Outcome.SENT

    def _later_than(self, head: Record) -> Record | None:
        """One to compare with: it needs what `head` needs of the store. It is sent again in turn.

        Rows need the database. Files need room for files too, so rows are the last resort.
        """
        with self._changed:
            later = [record for record in self._journal.peek(_MAX_BATCH)[1:] if record is not None]
        alike = [record for record in later if record.kind == head.kind]
        near = [record for record in later if record.is_file == head.is_file]
        others = later if head.is_file else []
        return next(iter([*alike, *near, *others]), None)

    def _settle(self, batch: list[Record | None], outcome: Outcome) -> None:
        """Take sent or refused records off the journal; leave the others for another attempt."""
        if outcome is Outcome.REFUSED:
            self._refuse(batch)
        elif outcome is not Outcome.SENT:
            self._failed(outcome)
        else:
            self._journal.settle(len(batch))
            self._delivered += len(batch)
            self._singly = max(0, self._singly - len(batch))
            self._attempts = self._unclear = 0
            if self._patient:
                self._deadline = time.monotonic() + _CLOSE_S
            if self._in_outage:
                self._in_outage = False
                self._warn("tracking: the store takes records again")

    def _failed(self, outcome: Outcome, what: str = "the store does not take records") -> None:
        self._attempts += 1
        self._unclear += outcome is Outcome.UNCLEAR
        if not self._in_outage:
            self._in_outage = True
            self._warn(
                f"tracking: {what} ({self._last_error}); the run goes on, and records are sent "
                "again later"
            )

    def _refuse(self, batch: list[Record | None]) -> None:
        """Of several records each is tried alone; one goes to the journal's refused records."""
        if len(batch) > 1:
            self._singly = len(batch)
            self._attempts = self._unclear = 0
            return
        self._journal.settle(1, refused_for=self._last_error)
        self._attempts = self._unclear = 0
        self._singly = max(0, self._singly - 1)
        self._refused += 1
        if self._refused == 1:
            what = "a record cannot be sent"
            if batch[0] is not None:
                what = f"the store refused a record of {batch[0].kind} {batch[0].name}".strip()
            self._warn(f"tracking: {what} ({self._last_error}); the run goes on without it")

    def _warn(self, text: str) -> None:
        with suppress(Exception):  # a closed terminal must not end the delivery
            self._warn_user(text)


def _one_line(error: Exception) -> str:
    """Without the statement and its values, which a database's errors repeat."""
    text = " ".join(str(error).split()).partition(" [SQL: ")[0] or type(error).__name__
    text = re.sub(r"^\([\w.]+Error\) ", "", text)
    return text if len(text) <= 300 else text[:297] + "..."
