"""Records on disk until a store has taken them: an outage or a killed run loses none.

FOLDER/
    target.json     the store (without password) and the MLflow run that the records belong to
    journal.jsonl   one record a line, in order; lines are only ever appended
    files/          texts, pictures and files of the journal that were not sent yet
    sent.json       how much of the journal was sent; a crash may leave it behind, never ahead
    refused.jsonl   records that the store refused, with its reasons
    lock            held by the run, or by `vapo deliver`
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections import deque
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from vapo.errors import UserError
from vapo.tracking.records import Record, from_json, to_json

JOURNAL_NAME = "journal.jsonl"
_CHUNK = 1 << 16


class JournalInUseError(UserError):
    """Its run, or a `vapo deliver`, is still going."""


class Journal:
    """The records of one run in their order. Not for several threads at once.

    Without a folder, while the folder's disk is full, and once the folder was deleted, records
    wait in memory. A line is with the operating system when `append` returns, so it outlives
    the process; `sync` makes it outlive a power cut too. Lines are read through the open file:
    they can still be sent when their folder was deleted.

    Raises: UserError if the folder cannot be written, or another process uses it.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.trouble: str | None = None
        self._in_memory: deque[Record] = deque()
        self._peeked: list[bytes] = []  # lines of the records looked at; b"": in memory
        self._end = self._sent_bytes = self.num_lines = self._num_sent = 0
        self._unsynced: list[Path] = []
        if folder is not None:
            self._open(folder)

    def _open(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("w")
            self._file = (folder / JOURNAL_NAME).open("a+b", buffering=0)
        except OSError as error:
            raise UserError(
                f"cannot write the run's records in {folder}: {error.strerror}; choose another "
                "output_dir or export_dir"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise JournalInUseError(
                f"{folder} is in use: its run, or a `vapo deliver`, is still going"
            ) from None
        for line in self._lines():
            self._end += len(line)
            self.num_lines += 1
        os.ftruncate(self._file.fileno(), self._end)  # half a line, where a process was killed
        with suppress(OSError, ValueError, KeyError, TypeError):
            mark = json.loads((folder / "sent.json").read_text())
            if mark["bytes"] <= self._end:
                self._sent_bytes, self._num_sent = int(mark["bytes"]), int(mark["lines"])

    def __len__(self) -> int:
        """How many records were not sent."""
        return self.num_lines - self._num_sent + len(self._in_memory)

    @property
    def is_gone(self) -> bool:
        """Whether the folder was deleted or moved away: nobody will find its records there."""
        if self.folder is None:
            return False
        try:
            there = os.stat(self.folder / JOURNAL_NAME)
        except FileNotFoundError:
            return True
        except OSError:  # it cannot be told now
            return False
        return not os.path.samestat(there, os.fstat(self._file.fileno()))

    @property
    def num_in_process(self) -> int:
        """How many of the records that were not sent no other process will find on the disk."""
        return len(self) if self.folder is None or self.is_gone else len(self._in_memory)

    def records(self, *, unsent: bool = False) -> Iterator[Record]:
        """What is on disk, from the first or from the first that was not sent; files by path."""
        for line in self._lines(self._sent_bytes if unsent else 0):
            with suppress(KeyError, TypeError, ValueError):
                yield from_json(json.loads(line))

    def append(self, record: Record) -> None:
        """Raises: nothing; `trouble` says why a record could only be kept in memory."""
        if self.folder is None or self._in_memory:
            self._in_memory.append(record)
            return
        try:
            self._write(record)
        except OSError as error:
            reason = "it was deleted or moved" if self.is_gone else error.strerror or error
            self.trouble = f"{self.folder}: {reason}"
            self._in_memory.append(record)

    def retry_disk(self) -> None:
        """Write what waits in memory, if there is room again. Not between `peek` and `settle`."""
        if self.folder is None:
            return
        with suppress(OSError):
            while self._in_memory:
                self._write(self._in_memory[0])
                self._in_memory.popleft()

    def peek(self, limit: int) -> list[Record | None]:
        """The next records, up to `limit`; None for a damaged line. `settle` takes them off.

        Raises: OSError if the journal cannot be read.
        """
        found: list[Record | None] = []
        self._peeked = []
        for line in self._lines(self._sent_bytes):
            if len(found) == limit:
                return found
            found.append(self._read(line))
            self._peeked.append(line)
        for record in self._in_memory:
            if len(found) == limit:
                break
            found.append(record)
            self._peeked.append(b"")
        return found

    def settle(self, num: int, *, refused_for: str | None = None) -> None:
        """The first `num` of the records that `peek` gave need not be sent any more.

        Raises: OSError, and leaves them, if refused records cannot be kept aside.
        """
        settled = self._peeked[:num]
        lines = [line for line in settled if line]
        if refused_for is not None:
            self._keep_refused(lines, refused_for)
        for line in settled:
            if not line:
                self._in_memory.popleft()
        self._num_sent += len(lines)
        self._sent_bytes += sum(map(len, lines))
        self._peeked = self._peeked[num:]
        if self.is_gone:
            return
        with suppress(OSError):  # records sent but not marked are sent again: stored once
            self._mark()
            if refused_for is None:
                for path in filter(None, map(self._file_of, lines)):
                    shutil.rmtree(path.parent, ignore_errors=True)

    def _mark(self) -> None:
        if self.folder is not None:
            temporary = self.folder / ".sent.json"
            temporary.write_text(json.dumps({"bytes": self._sent_bytes, "lines": self._num_sent}))
            temporary.replace(self.folder / "sent.json")

    def _keep_refused(self, lines: list[bytes], reason: str) -> None:
        if self.folder is None or self.is_gone:
            return
        entries = [{"reason": reason, "record": line.decode("utf-8", "replace")} for line in lines]
        with (self.folder / "refused.jsonl").open("ab") as refused:
            refused.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))

    def start_over(self, without: Container[str]) -> None:
        """Everything is to be sent, to another run: all but kinds `without`, and sent files."""
        if self.folder is None:
            return
        lines = []
        for line in self._lines():
            record, path = self._read(line), self._file_of(line)
            if record and record.kind not in without and (path is None or path.exists()):
                lines.append(line)
        self._end, self.num_lines = sum(map(len, lines)), len(lines)
        self._sent_bytes = self._num_sent = 0
        self._mark()
        aside = self.folder / f".{JOURNAL_NAME}.new"
        aside.write_bytes(b"".join(lines))
        aside.replace(self.folder / JOURNAL_NAME)
        self._file.close()
        self._file = (self.folder / JOURNAL_NAME).open("a+b", buffering=0)

    def sync(self) -> None:
        """Through the operating system to the disk."""
        if self.folder is None:
            return
        with suppress(OSError):
            paths, self._unsynced = self._unsynced, []
            for path in paths:
                if path.exists():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self.folder is not None:
            self.sync()
            self._file.close()
            self._lock.close()

    def _lines(self, start: int = 0) -> Iterator[bytes]:
        if self.folder is None:
            return
        rest = b""
        while chunk := os.pread(self._file.fileno(), _CHUNK, start):
            start += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line + b"\n" for line in lines)

    def _write(self, record: Record) -> None:
        """One line, and its file first: whole, or as if nothing had been written."""
        if self.is_gone:
            raise FileNotFoundError(self.folder)
        value = self._with_file(record) if record.is_file else to_json(record)
        line = json.dumps(value).encode() + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError("no room for a whole line")
        except OSError:
            os.ftruncate(self._file.fileno(), self._end)
            raise
        self._end += len(line)
        self.num_lines += 1

    def _with_file(self, record: Record) -> dict[str, Any]:
        assert self.folder is not None
        source = Path(record.payload) if record.kind == "file" else Path("content")
        path = self._new_folder(self.folder / "files") / source.name
        try:
            if record.kind == "file":
                shutil.copyfile(source, path)
            elif record.kind == "text":
                path.write_bytes(record.payload.encode("utf-8", "replace"))
            else:
                path.write_bytes(record.payload)
        except OSError:
            shutil.rmtree(path.parent, ignore_errors=True)
            raise
        self._unsynced.append(path)
        return {
            "kind": record.kind,
            "payload": str(path.relative_to(self.folder)),
            "name": record.name,
        }

    def _new_folder(self, parent: Path) -> Path:
        """Numbered as the line, or above: a journal that started over counts from there."""
        parent.mkdir(exist_ok=True)  # but never the journal's own folder again
        number = self.num_lines
        while (found := parent / str(number)).exists():
            number += 1
        found.mkdir()
        return found

    def _file_of(self, line: bytes) -> Path | None:
        with suppress(KeyError, TypeError, ValueError):
            record = from_json(json.loads(line))
            if record.is_file and self.folder is not None:
                return self.folder / record.payload
        return None

    def _read(self, line: bytes) -> Record | None:
        assert self.folder is not None
        try:
            record = from_json(json.loads(line))
            if not record.is_file:
                return record
            path = self.folder / record.payload
            if record.kind == "file":
                return Record("file", str(path), record.name)
            content = path.read_bytes()
        except (KeyError, TypeError, ValueError, FileNotFoundError):
            return None
        text = record.kind == "text"
        return Record(record.kind, content.decode() if text else content, record.name)
