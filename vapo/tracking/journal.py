"""Keeps records on disk until a store has taken them: an outage or a killed run loses none.

FOLDER/
    target.json     the store (without password) and the MLflow run that the records belong to
    journal.jsonl   one record a line, in order; lines are only ever appended
    files/          contents of the journal's artifacts that were not sent yet
    sent.json       how much of the journal was sent; a crash may leave it behind, never ahead
    refused.jsonl   records that the store refused, with its reasons
    lock            held by the run, or by `vapo deliver`

A run's folder may come from somebody else. So nothing outside the folder is read, sent, written
or removed, whatever the journal's lines and the folder's links say.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

from vapo.errors import UserError
from vapo.files.whole_files import open_inside, read_inside, remove_inside, try_lock, write_whole
from vapo.tracking.journal_folders import (
    ASIDE_NAME,
    CONTENTS_FOLDER,
    JOURNAL_NAME,
    MAX_LINE_BYTES,
    NAMES,
    PAYLOAD,
    REFUSED_NAME,
    SENT_NAME,
    TARGET_NAME,
    cannot_write_journal,
    check_own_files,
    lines_in,
)
from vapo.tracking.records import Record

_MAX_PAYLOAD_BYTES = 2**30
_MAX_CHECKED_BYTES = 2**25


class JournalInUseError(UserError):
    """Raised if another process writes into the journal or delivers it."""


class Journal:
    """A run's records in their order, on disk until a store has taken them. Not thread-safe.

    Each record is appended to the file as a line; lines that were not sent are also in memory.
    Without a folder, while the disk is full, and after the folder was deleted, records are in
    memory only. `append` hands a line to the operating system, so that it outlives the process;
    after `sync` it also outlives a power cut.

    Raises: UserError: the folder cannot be written, or another process uses it.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.trouble: str | None = None  # why records are in memory only
        self._lines_on_disk: deque[bytes] = deque()  # the file's lines that were not sent yet
        # later records, which are not in the file
        self._records_in_memory: deque[Record] = deque()
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            check_own_files(folder)
            self._lock = open_inside(folder, "lock", "ab")
            if not try_lock(self._lock, with_children=True):
                raise JournalInUseError(
                    f"{folder} is in use: its run, or a `vapo deliver`, is still running"
                )
            self._open()
        except OSError as error:
            raise cannot_write_journal(folder, error) from None

    def __len__(self) -> int:
        """Return the number of records that were not sent yet."""
        return len(self._lines_on_disk) + len(self._records_in_memory)

    @property
    def is_gone(self) -> bool:
        """Whether the folder was deleted or moved away, so that its records cannot be found."""
        if self.folder is None:
            return False
        try:
            there = os.stat(self.folder / JOURNAL_NAME)
        except FileNotFoundError:
            return True
        except OSError:  # unknown at the moment
            return False
        return not os.path.samestat(there, os.fstat(self._file.fileno()))

    @property
    def num_in_process(self) -> int:
        """The number of unsent records that only this process's memory has."""
        return len(self) if self.is_gone else len(self._records_in_memory)

    def records(self) -> list[Record]:
        """Return all records of the file, sent or not. An artifact has its content's path."""
        return [] if self.folder is None else read_from(self.folder)[0]

    def sent_records(self) -> list[Record]:
        """Return the records that the store said it took. Of a long journal, only the end is read.

        Raises: OSError: the journal cannot be read.
        """
        if self.folder is None or self.is_gone:
            return []
        start, end = max(0, self._sent_bytes - _MAX_CHECKED_BYTES), self._sent_bytes
        refused: set[str] = set()
        refused_lines = read_inside(self.folder, REFUSED_NAME, _MAX_CHECKED_BYTES) or b""
        for line in refused_lines.splitlines():
            with suppress(ValueError, TypeError, KeyError):
                refused.add(json.loads(line)["record"])
        records: dict[bytes, Record | None] = {}  # what was sent again is there twice
        for line in lines_in(self.folder, start):
            if (start := start + len(line)) > end:
                break
            records[line] = None if line.decode("utf-8", "replace") in refused else _parse(line)
        return [record for record in records.values() if record is not None]

    def append(self, record: Record) -> None:
        """Append a record; never raise. If it stays in memory only, `trouble` says why."""
        self._records_in_memory.append(record)
        self.retry_disk()

    def retry_disk(self) -> None:
        """Write records that are in memory only to the disk, in order, if possible."""
        try:
            while self.folder and self._records_in_memory:
                self._lines_on_disk.append(self._write(self._records_in_memory[0]))
                self._records_in_memory.popleft()
            self.trouble = None
        except OSError as error:
            reason = "it was deleted or moved" if self.is_gone else error.strerror or error
            self.trouble = f"{self.folder}: {reason}"

    def waiting(self) -> Iterator[Record | None]:
        """Yield the records that were not sent, oldest first; None for a damaged one.

        They stay in the journal until `remove_oldest` is called.

        Raises: OSError: an artifact's content cannot be read.
        """
        for record in map(_parse, self._lines_on_disk):
            if record and record.kind == "file":
                content = read_inside(self._path(), record.payload, _MAX_PAYLOAD_BYTES)
                record = None if content is None else replace(record, payload=content)
            yield record
        yield from self._records_in_memory

    def remove_oldest(self, num: int, *, refused_for: str | None = None) -> None:
        """Remove the oldest `num` waiting records, which were sent or `refused_for` a reason.

        Raises: OSError: refused records cannot be written to refused.jsonl; they then stay.
        """
        lines = list(islice(self._lines_on_disk, num))
        is_kept = lines and not self.is_gone
        if is_kept and refused_for is not None:
            with open_inside(self._path(), REFUSED_NAME, "ab") as refused:
                for line in lines:
                    entry = {"reason": refused_for, "record": line.decode("utf-8", "replace")}
                    refused.write(json.dumps(entry).encode() + b"\n")
        for _ in range(num):
            (self._lines_on_disk or self._records_in_memory).popleft()
        if not is_kept:
            return
        with suppress(OSError):  # records sent but not marked are sent again: stored once
            self._mark(self._sent_bytes + sum(map(len, lines)))
            for record in map(_parse, lines if refused_for is None else []):
                if record and record.kind == "file":
                    remove_inside(self._path(), record.payload)

    def start_over(self, without: Container[str]) -> None:
        """Mark all records as unsent, for another run, and drop the kinds in `without`.

        Artifacts that were sent are dropped, too, because their contents were removed.
        """
        if self.folder is None:
            return
        lines = []
        for line in lines_in(self.folder):
            record = _parse(line)
            if record and record.kind not in without:
                is_there = record.kind != "file" or self._path(record.payload).exists()
                lines += [line] if is_there else []
        self._mark(0)
        write_whole(self._path(JOURNAL_NAME), lambda aside: aside.write_bytes(b"".join(lines)))
        self._file.close()
        self._open()

    def bind(self, tracking_uri: str, run_id: str) -> None:
        """Write target.json: the store and the run that the records belong to. Raises: OSError."""
        if self.folder is not None:
            target = {"tracking_uri": tracking_uri, "mlflow_run_id": run_id}
            with open_inside(self.folder, TARGET_NAME, "wb") as file:
                file.write(json.dumps(target).encode() + b"\n")

    def sync(self) -> None:
        """Force everything written so far to the disk."""
        if self.folder is None:
            return
        with suppress(OSError):
            contents = self.folder / CONTENTS_FOLDER
            for name in os.listdir(contents) if contents.is_dir() else ():
                payload = f"{CONTENTS_FOLDER}/{name}"
                if PAYLOAD.fullmatch(payload):
                    with open_inside(self.folder, payload, "rb") as file:
                        os.fsync(file.fileno())
            os.fsync(self._file.fileno())

    def discard(self) -> None:
        """Remove the files of the closed journal, and its folder if no other files are in it."""
        if self.folder is None:
            return
        with suppress(OSError):  # what cannot be removed is left
            for record in filter(None, map(_parse, lines_in(self.folder))):
                if record.kind == "file":
                    remove_inside(self.folder, record.payload)
            for name in NAMES:
                remove_inside(self.folder, name)
            for path in (self.folder / CONTENTS_FOLDER, self.folder):
                if path.is_dir() and not any(path.iterdir()):
                    path.rmdir()

    def close(self) -> None:
        if self.folder is not None:
            self.sync()
            self._file.close()
            self._lock.close()

    def _open(self) -> None:
        """Open the journal to append, cut off an unfinished last line, read unsent lines."""
        self._file = open_inside(self._path(), JOURNAL_NAME, "ab", buffering=0)
        self._end = sum(map(len, lines_in(self._path())))
        os.ftruncate(self._file.fileno(), self._end)  # half a line, where a process was killed
        self._sent_bytes = 0
        with suppress(OSError, ValueError, KeyError, TypeError):
            text = read_inside(self._path(), SENT_NAME, MAX_LINE_BYTES)
            marked = int(json.loads(text or b"")["bytes"])
            self._sent_bytes = marked if 0 <= marked <= self._end else 0
        self._lines_on_disk = deque(lines_in(self._path(), self._sent_bytes))

    def _mark(self, sent_bytes: int) -> None:
        self._sent_bytes = sent_bytes
        # not forced to disk: the run's thread may be waiting
        with open_inside(self._path(), ASIDE_NAME, "wb") as aside:
            aside.write(json.dumps({"bytes": sent_bytes}).encode())
        self._path(ASIDE_NAME).replace(self._path(SENT_NAME))

    def _write(self, record: Record) -> bytes:
        """Append a record to the journal as one line, and return the line.

        An artifact's content is written first, to a file of its own. After an OSError neither the
        line nor the content remains.
        """
        if self.is_gone:
            raise FileNotFoundError(self.folder)
        is_file = record.kind == "file"
        payload = f"{CONTENTS_FOLDER}/{uuid4().hex}" if is_file else record.payload
        value = {"kind": record.kind, "payload": payload, "name": record.name}
        line = json.dumps(value).encode() + b"\n"
        try:
            if is_file:
                self._path(CONTENTS_FOLDER).mkdir(
                    exist_ok=True
                )  # not the journal's: it may be deleted
                with open_inside(self._path(), payload, "wb") as file:
                    file.write(record.payload)
            if self._file.write(line) != len(line):
                raise OSError("no room for a whole line")
        except OSError:
            os.ftruncate(self._file.fileno(), self._end)
            if is_file:
                remove_inside(self._path(), payload)
            raise
        self._end += len(line)
        return line

    def _path(self, name: str = "") -> Path:
        assert self.folder is not None
        return self.folder / name


def read_from(folder: Path, start: int = 0) -> tuple[list[Record], int]:
    """Return the complete records from byte `start` of another process's journal, and their end.

    If the journal is shorter than `start`, it was begun anew, and is read from its beginning.

    Raises: OSError: the journal cannot be read.
    """
    if (folder / JOURNAL_NAME).stat().st_size < start:
        start = 0
    lines = list(lines_in(folder, start))
    return list(filter(None, map(_parse, lines))), start + sum(map(len, lines))


def _parse(line: bytes) -> Record | None:
    """Return the record of a journal's line, or None if the line is damaged.

    The payload of a `file` record is the path of its content in the journal's folder.
    """
    try:
        record = Record(**json.loads(line))
    except (TypeError, ValueError, RecursionError):
        return None
    if record.kind == "file":
        payload_match = isinstance(record.payload, str) and PAYLOAD.fullmatch(record.payload)
        return record if payload_match and isinstance(record.name, str) else None
    return record if _is_well_formed(record) else None


def _is_well_formed(record: Record) -> bool:
    """Whether a record from the disk, of any kind but `file`, has the form that a run writes."""
    match record.kind, record.payload:
        case "metrics", list(items):
            return all(map(_is_metric, items))
        case "params" | "tags", dict(texts):
            return all(isinstance(text, str) for item in texts.items() for text in item)
        case "note", str():
            return True
        case "inputs", list(items):
            return all(map(_is_input, items))
        case "status", [str(), at_ms]:
            return _is_time(at_ms)
    return False


def _is_metric(item: Any) -> bool:
    match item:
        case [str(), int() | float() as value, at_ms, step]:
            return not isinstance(value, bool) and _is_time(at_ms) and _is_step(step)
    return False


def _is_input(item: Any) -> bool:
    match item:
        case [str(), str(), str(), int(), str()]:
            return True
    return False


def _is_time(value: Any) -> bool:
    """Whether a value is a time in ms that a store can hold."""
    return _is_step(value) and value >= 0


def _is_step(value: Any) -> bool:
    """Whether a value is a step that a store can hold. Steps of value pretraining are below 0."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
