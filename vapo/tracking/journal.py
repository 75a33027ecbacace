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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from vapo.errors import UserError
from vapo.tracking.records import Record, from_json, to_json

JOURNAL_NAME = "journal.jsonl"


class JournalInUseError(UserError):
    """Its run, or a `vapo deliver`, is still going."""


class Journal:
    """The records of one run in their order. Not for several threads at once.

    Without a folder, and while the folder's disk is full, records wait in memory. A line is
    with the operating system when `append` returns, so it outlives the process; `sync` makes
    it outlive a power cut too.

    Raises: UserError if the folder cannot be written, or another process uses it.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.trouble: str | None = None
        self._in_memory: deque[Record] = deque()
        self._peeked: list[int] = []  # bytes of each record that was looked at; 0: in memory
        self._end = self._sent_bytes = self.num_lines = self._num_sent = 0
        self._unsynced: list[Path] = []
        if folder is not None:
            self._open(folder)

    def _open(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("w")
            self._file = (folder / JOURNAL_NAME).open("ab", buffering=0)
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
            self.trouble = f"{self.folder}: {error.strerror or error}"
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
        """The next records, up to `limit`; None for a damaged line. `settle` takes them off."""
        found: list[Record | None] = []
        self._peeked = []
        for line in self._lines(self._sent_bytes):
            if len(found) == limit:
                return found
            found.append(self._read(line))
            self._peeked.append(len(line))
        for record in self._in_memory:
            if len(found) == limit:
                break
            found.append(record)
            self._peeked.append(0)
        return found

    def settle(self, num: int, *, refused_for: str | None = None) -> None:
        """The first `num` of the records that `peek` gave need not be sent any more."""
        paths: list[Path] = []
        if self.folder is not None:
            paths = self._settle_on_disk(sum(self._peeked[:num]), refused_for)
        for length in self._peeked[:num]:
            if length:
                self._num_sent += 1
                self._sent_bytes += length
            else:
                self._in_memory.popleft()
        self._peeked = self._peeked[num:]
        if self.folder is None:
            return
        with suppress(OSError):  # records sent but not marked are sent again: stored once
            mark = {"bytes": self._sent_bytes, "lines": self._num_sent}
            temporary = self.folder / ".sent.json"
            temporary.write_text(json.dumps(mark))
            temporary.replace(self.folder / "sent.json")
            for path in paths:
                shutil.rmtree(path.parent, ignore_errors=True)

    def _settle_on_disk(self, num_bytes: int, refused_for: str | None) -> list[Path]:
        """Keep refused lines; the files that settled lines named and that may go."""
        assert self.folder is not None
        with (self.folder / JOURNAL_NAME).open("rb") as file:
            file.seek(self._sent_bytes)
            settled = file.read(num_bytes).splitlines()
        if refused_for is None:
            return [path for line in settled if (path := self._file_of(line))]
        with suppress(OSError), (self.folder / "refused.jsonl").open("ab") as refused:
            for line in settled:
                reason = json.dumps(
                    {"reason": refused_for, "record": line.decode("utf-8", "replace")}
                )
                refused.write(reason.encode() + b"\n")
        return []

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
        with (self.folder / JOURNAL_NAME).open("rb") as file:
            file.seek(start)
            yield from (line for line in file if line.endswith(b"\n"))

    def _write(self, record: Record) -> None:
        """One line, and its file first: whole, or as if nothing had been written."""
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
        path = self.folder / "files" / str(self.num_lines) / source.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if record.kind == "file":
            shutil.copyfile(source, path)
        elif record.kind == "text":
            path.write_bytes(record.payload.encode("utf-8", "replace"))
        else:
            path.write_bytes(record.payload)
        self._unsynced.append(path)
        return {
            "kind": record.kind,
            "payload": str(path.relative_to(self.folder)),
            "name": record.name,
        }

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
        except (KeyError, TypeError, ValueError, OSError):
            return None
        text = record.kind == "text"
        return Record(record.kind, content.decode() if text else content, record.name)
