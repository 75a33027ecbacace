"""The records of a run, as plain data that can wait on disk until a store has taken it."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Kind = Literal["metrics", "params", "tags", "note", "file", "inputs", "status"]
TABLES_TAG = "mlflow.loggedArtifacts"
"""The tag that lists the tables for MLflow's UI and `load_table`."""
_MAX_TAG_CHARS = 7500
NOTE_TAG = "mlflow.note.content"
"""The tag that MLflow shows as a run's description."""
SCORE_START = "held-out avg@"
"""How the line of a description that gives the run's score begins."""


class InputData(NamedTuple):
    """A data set that a run reads, for MLflow; `context` is `training` or `evaluation`."""

    name: str
    context: str
    digest: str
    num_rows: int
    source: str


@dataclass(frozen=True)
class Record:
    """One message to the store about a run. The form of `payload` depends on the kind.

    metrics: list of (key, value, unix time in ms, step); params, tags: dict of strings; note: the
    line with the score, to be the first of the run's description; file: bytes, and `name` is the
    artifact's path; inputs: list of `InputData`; status: (MLflow's word, unix time in ms). A
    payload that was read from JSON has lists for tuples.
    """

    kind: Kind
    payload: Any
    name: str = ""


def is_run_id(value: object) -> bool:
    """Whether a value has the form of an MLflow run's id, and may be in addresses and paths."""
    return isinstance(value, str) and re.fullmatch(r"[0-9A-Za-z_-]{1,64}", value) is not None


def with_score(note: str, score_line: str) -> str:
    """Return the description `note` with `score_line` first, in place of an earlier score."""
    first, _, rest = note.partition("\n\n")
    text = rest if first.startswith(SCORE_START) else note
    return f"{score_line}\n\n{text}" if text else score_line


def table_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as the JSON of an MLflow table, with all their columns in order.

    Nan and inf become null, as pandas writes them, because JSON has neither.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    data = [[row.get(column) for column in columns] for row in rows]
    for cells in data:
        cells[:] = [None if isinstance(x, float) and not math.isfinite(x) else x for x in cells]
    return json.dumps({"columns": columns, "data": data}, default=str)


def with_table(listed: str, name: str) -> str:
    """Return `TABLES_TAG`'s value: the earlier one, `listed`, with the table `name` at its end.

    Its length is bounded: the oldest tables drop out of it, and stay readable as artifacts.
    """
    entry = {"path": name, "type": "table"}
    try:
        earlier = json.loads(listed)
    except (ValueError, RecursionError):  # somebody has written into the tag
        earlier = []
    tables = [*(table for table in earlier if table != entry), entry]
    while len(json.dumps(tables)) > _MAX_TAG_CHARS:
        del tables[0]
    return json.dumps(tables)


class Clock:
    """Gives unix times in ms that never repeat within a run.

    A store keeps one row for each (key, time, step, value). So a record that is sent twice, because
    a crash came between sending and noting it, is stored once; and two values are two rows.
    """

    def __init__(self) -> None:
        self._last = 0

    def after(self, at_ms: int) -> None:
        """Make every later time greater than `at_ms`."""
        self._last = max(self._last, at_ms)

    def now_ms(self) -> int:
        self._last = max(self._last + 1, int(time.time() * 1000))
        return self._last
