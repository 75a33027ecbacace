"""Sends tracking records to a store in order, in the background: training never waits for a
store."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from vapo.tracking.journal import Journal
from vapo.tracking.records import Record

_MAX_BATCH = 200
_MAX_METRICS = 1000  # in one request to MLflow
_MAX_ATTEMPTS = 20
_MAX_ATTEMPTS_AT_CLOSE = 3
_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
_CLOSE_S = 120.0


class OutageError(Exception):
    """Raised if the store takes no record at the moment, or it is unknown whether it does."""


class RefusedError(Exception):
    """Raised if the store finds the record itself invalid, so that it would never be taken."""


class Sink(Protocol):
    """The interface through which `Delivery` sends records to a store.

    `send` gets several records at once only if all of them are metrics. It raises OutageError or
    RefusedError; for any other error it is unknown whether the record or the store causes it.
    """

    def send(self, records: Sequence[Record]) -> None: ...


@dataclass(frozen=True)
class DeliveryReport:
    """How many records of a run were delivered, refused or are left.

    `undelivered` records were not sent, and `num_lost` of these are not on disk either.
    `missing_files` are artifacts that the store said it took but does not have; their contents were
    removed from the disk when it said so.
    """

    delivered: int
    undelivered: int
    refused: int
    last_error: str | None
    num_lost: int = 0
    missing_files: tuple[str, ...] = ()


class Delivery:
    """Sends a journal's records one after the other, in order, in a thread.

    In an outage the records wait in the journal, however long the outage lasts, and are tried again
    after 1, 2, 4 ... 30 s. Every error counts as an outage unless the store clearly blames the
    record. A record is refused, and left out, only if the store finds it invalid, or if it fails 20
    times and once more after the store has taken a later one. So no record can hold up a run.

    Args:
        warn: called when an outage begins and ends, for the first refused record, and when the
            journal can no longer be written.
        redact: removes the store's credentials from errors.
        missing: called at the end with the sent records; returns those that the store does not
            have.
    """

    def __init__(
        self,
        sink: Sink,
        warn: Callable[[str], None],
        journal: Journal | None = None,
        *,
        redact: Callable[[str], str] = str,
        missing: Callable[[Sequence[Record]], list[Record]] | None = None,
    ) -> None:
        self._sink = sink
        self._missing = missing
        self._num_checks = 0
        self._missing_files: tuple[str, ...] = ()
        self._redact = redact
        self._warn_user = warn
        self._journal = Journal(None) if journal is None else journal
        self._changed = threading.Condition()
        self._deadline: float | None = None  # set by `close`
        self._close_s = _CLOSE_S
        self._patient = False  # whether each success moves the deadline
        self._thread_has_ended = False
        self._abandoned = False  # whether it was still at work after the deadline
        self._delivered = self._refused = 0
        self._failures = 0  # since the last success; above 0 there is an outage
        self._unclear = 0  # those failures that may be the first record's fault
        self._singly = 0  # the number of records to be tried alone, after a refused batch
        self._last_error: str | None = None
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def submit(self, record: Record) -> None:
        """Append a record to the journal, from which the thread sends it."""
        with self._changed:
            if self._deadline is not None:
                raise RuntimeError("the run's tracking is closed")
            previous_trouble = self._journal.trouble
            self._journal.append(record)
            trouble = self._journal.trouble
            self._changed.notify_all()
        if trouble and not previous_trouble:
            self._warn(
                f"tracking: cannot write {trouble}; the run continues, its records wait in memory"
            )

    def sync(self) -> None:
        """Force the records submitted so far to the disk, without waiting for the store."""
        with self._changed:
            self._journal.sync()

    def flush(self, timeout_s: float) -> bool:
        """Wait until every record was sent or refused; return whether that is so after `timeout_s`.

        In an outage it returns False at once.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: not self._journal or self._failures > 0 or self._thread_has_ended, timeout_s
            ):  # a store that hangs: the end of the run has one deadline for all its waits
                self._close_s = max(self._close_s - timeout_s, _CLOSE_S / 10)
            return not self._journal

    def close(self, *, while_it_moves: bool = False) -> DeliveryReport:
        """Send the last records within 2 minutes, in an outage in one attempt; return a report.

        With `while_it_moves` each success allows another 2 minutes. An attempt that has not ended
        by then is abandoned: its thread cannot be ended, but it no longer touches the journal, and
        does not keep the process from ending.
        """
        with self._changed:
            self._patient = while_it_moves
            if self._deadline is None:
                self._deadline = time.monotonic() + self._close_s
            self._changed.notify_all()
            while not self._thread_has_ended and (left_s := self._deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)
            if not self._thread_has_ended and not self._abandoned:
                self._last_error = f"an attempt did not end within {self._close_s:g} s"
            self._abandoned = True
            self._journal.retry_disk()
            undelivered, num_lost = len(self._journal), self._journal.num_in_process
            return DeliveryReport(
                self._delivered,
                undelivered,
                self._refused,
                self._last_error,
                num_lost,
                self._missing_files,
            )

    def _work(self) -> None:
        try:
            while self._attempt():
                pass
        finally:
            with self._changed:
                self._thread_has_ended = True
                self._changed.notify_all()

    def _attempt(self) -> bool:
        """Try to send the next batch, and wait after a failure; return whether to try again."""
        problem = "the store does not take records"
        with self._changed:
            self._changed.wait_for(lambda: self._journal or self._deadline is not None)
            closing = self._deadline is not None  # an attempt under way is not yet the last one
        try:
            if not (batch := self._next_batch()):
                return self._send_missing_again()
            error = self._try(batch)
            with self._changed:
                if not self._abandoned and (error is None or isinstance(error, RefusedError)):
                    self._remove_batch(batch, is_sent=error is None)
                    self._changed.notify_all()
                    return True
        except OSError as raised:  # the journal's
            problem = "the run's journal cannot be used"
            error = OutageError()
            self._last_error = self._redact(one_line(raised))
        with self._changed:
            if self._abandoned:
                return False
            self._failures += 1
            if self._failures == 1:
                self._warn(
                    f"tracking: {problem} ({self._last_error}); the run continues, and its records "
                    "are sent again later"
                )
            self._changed.notify_all()
            if closing and isinstance(error, OutageError):
                return False
            self._journal.sync()
            wait_s = min(_FIRST_RETRY_S * 2 ** min(self._failures - 1, 10), _LONGEST_RETRY_S)
            self._changed.wait_for(
                lambda: self._abandoned or (self._deadline is not None) != closing, wait_s
            )
        return True

    def _next_batch(self) -> list[Record | None]:
        """Return the oldest waiting record and, if it is metrics, the metrics that follow.

        A damaged record is None. The list is empty if no record is left.

        Raises: OSError: the journal cannot be read.
        """
        batch: list[Record | None] = []
        num = 0
        with self._changed:
            if self._abandoned:
                return batch
            self._journal.retry_disk()
            for record in islice(self._journal.waiting(), 1 if self._singly else _MAX_BATCH):
                is_metrics = record is not None and record.kind == "metrics"
                if record is not None and isinstance(record.payload, list):
                    num += len(record.payload)
                if batch and (num > _MAX_METRICS or not is_metrics):
                    break
                batch.append(record)
                if not is_metrics:
                    break
            return batch

    def _send_missing_again(self) -> bool:
        """Ask the store at the end which sent records it lacks; return whether to send more now.

        A record that it lacks is sent once more. If the store then still lacks it, it stays in the
        journal, where `vapo deliver` finds it.
        """
        if self._missing is None or self._abandoned:
            return False
        with self._changed:
            sent_records = self._journal.sent_records()
        try:
            missing = self._missing(sent_records) if sent_records else []
        except Exception as error:
            reason = self._redact(one_line(error))
            self._warn(f"tracking: the store was not asked for what it has of the run: {reason}")
            return False
        self._missing_files = tuple(record.name for record in missing if record.kind == "file")
        again = [record for record in missing if record.kind != "file"]
        with self._changed:
            if self._abandoned or not missing:
                return False
            self._num_checks += 1
            for record in again:
                self._journal.append(record)
            self._delivered -= len(again)
        if self._num_checks == 1:
            self._warn(
                f"tracking: the store does not have {len(missing)} records that it said it took"
            )
            return bool(again)
        self._last_error = "the store says that it takes records, and does not have them"
        return False

    def _try(self, batch: list[Record | None]) -> Exception | None:
        """Send a batch. Return None if it was sent, else the error: refused, outage or unclear.

        After repeated unclear failures of one record, a later record is sent as a probe. If the
        probe is taken and the record fails once more, the record is refused. The probe is a record
        of the same kind if there is one, because files also need room for files. It is sent again
        in its turn.
        """
        records = [record for record in batch if record is not None]
        if not records:
            self._last_error = "its line in the journal is damaged, or its file is gone"
            return RefusedError()
        error = self._send(records)
        if error is None or isinstance(error, (OutageError, RefusedError)):
            return error
        self._unclear += 1
        if self._unclear < (_MAX_ATTEMPTS if self._deadline is None else _MAX_ATTEMPTS_AT_CLOSE):
            return error
        if len(records) > 1:
            return RefusedError()  # to be tried one by one
        with self._changed:
            later = list(filter(None, islice(self._journal.waiting(), 1, _MAX_BATCH)))
        alike = [record for record in later if record.kind == records[0].kind]
        probe_records = alike + [record for record in later if record.kind != "file"]
        if not probe_records or self._send(probe_records[:1]) is not None:
            return OutageError()
        again = self._send(records)
        return again if again is None or isinstance(again, OutageError) else RefusedError()

    def _send(self, records: list[Record]) -> Exception | None:
        try:
            self._sink.send(records)
        except Exception as error:
            self._last_error = self._redact(one_line(error))
            return error
        return None

    def _remove_batch(self, batch: list[Record | None], *, is_sent: bool) -> None:
        """Remove a sent or refused batch. If several records were refused, try each alone."""
        self._unclear = 0
        if not is_sent and len(batch) > 1:
            self._singly = len(batch)
            return
        self._journal.remove_oldest(len(batch), refused_for=None if is_sent else self._last_error)
        self._singly = max(0, self._singly - len(batch))
        if not is_sent:
            self._refused += 1
            if self._refused == 1:
                problem = "a record cannot be sent"
                if batch[0] is not None:
                    problem = (
                        f"the store refused a record of {batch[0].kind} {batch[0].name}".strip()
                    )
                self._warn(
                    f"tracking: {problem} ({self._last_error}); the run continues without it"
                )
            return
        self._delivered += len(batch)
        if self._patient:
            self._deadline = time.monotonic() + _CLOSE_S
        if self._failures:
            self._failures = 0
            self._warn("tracking: the store takes records again")

    def _warn(self, text: str) -> None:
        with suppress(Exception):  # a closed terminal must not end the delivery
            self._warn_user(text)


def one_line(error: object) -> str:
    """Return an error's message in one short line, without a database's SQL statement."""
    text = " ".join(str(error).split()).partition(" [SQL: ")[0] or type(error).__name__
    text = re.sub(r"^\([\w.]+Error\) ", "", text)
    return text if len(text) <= 300 else text[:297] + "..."
