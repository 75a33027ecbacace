"""What a run records, as plain data: it waits on disk until a store has taken it."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["metrics", "params", "tags", "text", "bytes", "file", "inputs", "status"]


@dataclass(frozen=True)
class InputData:
    """A data set that a run reads: `context` is `training` or `evaluation`."""

    name: str
    context: str
    digest: str
    num_rows: int
    source: str


@dataclass(frozen=True)
class Record:
    """One thing to record. `payload` by kind:

    metrics: list of (key, value, unix time in ms, step); params, tags: dict of strings;
    text: str; bytes: bytes; file: path of a local file; inputs: list of `InputData`;
    status: (MLflow's word, unix time in ms). `name` is the artifact's path for text and bytes,
    its folder for a file.
    """

    kind: Kind
    payload: Any
    name: str = ""

    @property
    def is_file(self) -> bool:
        return self.kind in ("text", "bytes", "file")


def to_json(record: Record) -> dict[str, Any]:
    """A record that is no file as JSON values; nan, which JSON lacks, is null."""
    payload = record.payload
    if record.kind == "metrics":
        payload = [
            [key, None if math.isnan(value) else value, at, step]
            for key, value, at, step in payload
        ]
    elif record.kind == "inputs":
        payload = [asdict(data) for data in payload]
    return {"kind": record.kind, "payload": payload, "name": record.name}


def from_json(value: Any) -> Record:
    """Raises: KeyError, TypeError or ValueError for what `to_json` does not write."""
    kind, payload = value["kind"], value["payload"]
    if kind == "metrics":
        payload = [
            (key, math.nan if number is None else float(number), int(at), int(step))
            for key, number, at, step in payload
        ]
    elif kind == "inputs":
        payload = [InputData(**data) for data in payload]
    elif kind == "status":
        payload = tuple(payload)
    return Record(kind, payload, value["name"])


class Clock:
    """Unix times in ms that never repeat.

    A store keeps one row for each (key, time, step, value). So a row that is sent twice, because
    a crash came between sending and noting it, is stored once; and two values are two rows.
    """

    def __init__(self) -> None:
        self._last = 0

    def after(self, at_ms: int) -> None:
        """Never again this time, or one before it."""
        self._last = max(self._last, at_ms)

    def now_ms(self) -> int:
        self._last = max(self._last + 1, int(time.time() * 1000))
        return self._last
