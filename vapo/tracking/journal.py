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
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

from vapo.errors import UserError
from vapo.tracking.records import Record, from_json, to_json

JOURNAL_NAME = "journal.jsonl"
_TARGET = "target.json"


class JournalInUseError(UserError):
    """Its run, or a `vapo deliver`, is still going."""


class Journal:
    """The records of one run in their order. Not for several threads at once.

    A record is a line of the file first; the lines that were not sent are in memory too. Without
    a folder, while its disk is full, and once it was deleted, a record is only there. A line is
    with the operating system when `append` returns, so it outlives the process; `sync` makes it
    outlive a power cut too.

    Raises: UserError if the folder cannot be written, or another process uses it.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.trouble: str | None = None  # why records are in memory only
        self._waiting: deque[bytes | Record] = deque()  # lines of the file; then what is not in it
        self._num_not_written = 0
        self._unsynced: list[Path] = []
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("w")
            self._file = (folder / JOURNAL_NAME).open("ab", buffering=0)
        except OSError as error:
            raise cannot_write(folder, error) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise JournalInUseError(
                f"{folder} is in use: its run, or a `vapo deliver`, is still going"
            ) from None
        self._end = sum(map(len, self._lines()))
        os.ftruncate(self._file.fileno(), self._end)  # half a line, where a process was killed
        self._sent_bytes = 0
        with suppress(OSError, ValueError, KeyError, TypeError):
            marked = int(json.loads((folder / "sent.json").read_text())["bytes"])
            self._sent_bytes = marked if marked <= self._end else 0
        self._waiting.extend(self._lines(self._sent_bytes))

    def __len__(self) -> int:
        """How many records were not sent."""
        return len(self._waiting)

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
        return len(self) if self.is_gone else self._num_not_written

    def records(self) -> Iterator[Record]:
        """What is in the file, sent or not; files by their paths, whether they are there or not."""
        return filter(None, map(self._parse, self._lines()))

    def append(self, record: Record) -> None:
        """Raises: nothing; `trouble` says why a record could only be kept in memory."""
        self._waiting.append(record)
        self._num_not_written += 1
        self.retry_disk()

    def retry_disk(self) -> None:
        """Write what is in memory only, in order, if there is room."""
        try:
            while self.folder and self._num_not_written:
                record = self._waiting[-self._num_not_written]
                assert isinstance(record, Record)
                self._waiting[-self._num_not_written] = self._write(record)
                self._num_not_written -= 1
            self.trouble = None
        except OSError as error:
            reason = "it was deleted or moved" if self.is_gone else error.strerror or error
            self.trouble = f"{self.folder}: {reason}"

    def waiting(self) -> Iterator[Record | None]:
        """The records that were not sent; None for a damaged line. `settle` takes them off.

        Raises: OSError if a file of theirs cannot be read.
        """
        for item in self._waiting:
            yield item if isinstance(item, Record) else self._read(item)

    def settle(self, num: int, *, refused_for: str | None = None) -> None:
        """The first `num` that are waiting need not be sent any more.

        Raises: OSError, and leaves them, if refused records cannot be kept aside.
        """
        lines = [item for item in islice(self._waiting, num) if isinstance(item, bytes)]
        is_kept = self.folder is not None and not self.is_gone
        if is_kept and lines and refused_for is not None:
            self._keep_refused(lines, refused_for)
        for _ in range(num):
            self._waiting.popleft()
        self._num_not_written -= num - len(lines)
        if not is_kept or not lines:
            return
        self._sent_bytes += sum(map(len, lines))
        with suppress(OSError):  # records sent but not marked are sent again: stored once
            self._mark()
            for record in map(self._parse, lines if refused_for is None else []):
                if record and record.is_file:
                    shutil.rmtree(record.payload.parent, ignore_errors=True)

    def start_over(self, without: Container[str]) -> None:
        """Everything is to be sent, to another run: all but kinds `without`, and sent files."""
        if self.folder is None:
            return
        lines = []
        for line in self._lines():
            record = self._parse(line)
            if record and record.kind not in without:
                lines += [line] if not record.is_file or record.payload.exists() else []
        self._sent_bytes = 0
        self._mark()
        aside = self.folder / f".{JOURNAL_NAME}.new"
        aside.write_bytes(b"".join(lines))
        aside.replace(self.folder / JOURNAL_NAME)
        self._file.close()
        self._file = (self.folder / JOURNAL_NAME).open("ab", buffering=0)
        self._end = sum(map(len, lines))
        self._waiting = deque(lines)

    def bind(self, tracking_uri: str, run_id: str) -> None:
        """Note whose records these are. Raises: OSError."""
        if self.folder is not None:
            target = {"tracking_uri": tracking_uri, "mlflow_run_id": run_id}
            (self.folder / _TARGET).write_text(json.dumps(target) + "\n")

    def sync(self) -> None:
        """Through the operating system to the disk."""
        if self.folder is None:
            return
        with suppress(OSError):
            paths, self._unsynced = self._unsynced, []
            for path in filter(Path.exists, paths):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self.folder is not None:
            self.sync()
            self._file.close()
            self._lock.close()

    def _lines(self, start: int = 0) -> Iterator[bytes]:
        if self.folder is not None:
            with (self.folder / JOURNAL_NAME).open("rb") as file:
                file.seek(start)
                yield from (line for line in file if line.endswith(b"\n"))

    def _mark(self) -> None:
        assert self.folder is not None
        temporary = self.folder / ".sent.json"
        temporary.write_text(json.dumps({"bytes": self._sent_bytes}))
        temporary.replace(self.folder / "sent.json")

    def _keep_refused(self, lines: list[bytes], reason: str) -> None:
        assert self.folder is not None
        entries = [{"reason": reason, "record": line.decode("utf-8", "replace")} for line in lines]
        with (self.folder / "refused.jsonl").open("ab") as refused:
            refused.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))

    def _write(self, record: Record) -> bytes:
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
        return line

    def _with_file(self, record: Record) -> dict[str, Any]:
        assert self.folder is not None
        name = Path(record.payload).name if record.kind == "file" else "content"
        path = self.folder / "files" / uuid4().hex / name
        try:
            path.parent.parent.mkdir(exist_ok=True)  # but never the journal's own folder again
            path.parent.mkdir()
            if record.kind == "file":
                shutil.copyfile(record.payload, path)
            elif record.kind == "text":
                path.write_bytes(record.payload.encode("utf-8", "replace"))
            else:
                path.write_bytes(record.payload)
        except OSError:
            shutil.rmtree(path.parent, ignore_errors=True)
            raise
        self._unsynced.append(path)
        payload = str(path.relative_to(self.folder))
        return {"kind": record.kind, "payload": payload, "name": record.name}

    def _parse(self, line: bytes) -> Record | None:
        """The payload of a file is its path; None for a damaged line."""
        assert self.folder is not None
        try:
            record = from_json(json.loads(line))
            path = self.folder / record.payload if record.is_file else None
        except (KeyError, TypeError, ValueError):
            return None
        return record if path is None else Record(record.kind, path, record.name)

    def _read(self, line: bytes) -> Record | None:
        record = self._parse(line)
        if record is None or record.kind not in ("text", "bytes"):
            return record
        try:
            content = record.payload.read_bytes()
        except FileNotFoundError:
            return None
        text = content.decode("utf-8", "replace") if record.kind == "text" else content
        return Record(record.kind, text, record.name)


def read_target(folder: Path) -> dict[str, Any] | None:
    """What `Journal.bind` noted: `tracking_uri` and `mlflow_run_id`; None if nothing readable."""
    try:
        target = json.loads((folder / _TARGET).read_text())
    except (OSError, ValueError):
        return None
    return target if isinstance(target, dict) and "tracking_uri" in target else None


def set_aside_others(folder: Path, run_id: str | None, note: Callable[[str], None]) -> None:
    """Another run's journal in this folder keeps its records under another name."""
    target = read_target(folder)
    if target is None or target.get("mlflow_run_id") == run_id:
        return
    other = folder.with_name(f"{folder.name}-{str(target.get('mlflow_run_id'))[:12]}")
    if not other.exists():
        folder.rename(other)
        note(f"tracking: the records of an earlier run in {folder} are now in {other}")


def cannot_write(folder: Path | None, error: OSError) -> UserError:
    return UserError(
        f"cannot write the run's records in {folder}: {error.strerror}; make room, or choose "
        "another output_dir or export_dir"
    )
