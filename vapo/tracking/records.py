"""What a run records, as plain data: it waits on disk until a store has taken it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Kind = Literal["metrics", "params", "tags", "note", "file", "inputs", "status"]
NOTE_TAG = "mlflow.note.content"
"""The tag that MLflow shows as a run's description."""
SCORE_START = "held-out avg@"
"""How the line of a description that gives the run's score begins."""


class InputData(NamedTuple):
    """A data set that a run reads: `context` is `training` or `evaluation`."""

    name: str
    context: str
    digest: str
    num_rows: int
    source: str


@dataclass(frozen=True)
class Record:
    """One thing to record. `payload` by kind, where JSON gives a list back for a tuple:

    metrics: list of (key, value, unix time in ms, step); params, tags: dict of strings;
    note: the line with the score, to be the first of the run's description;
    file: bytes, and `name` is the artifact's path; inputs: list of `InputData`;
    status: (MLflow's word, unix time in ms).
    """

    kind: Kind
    payload: Any
    name: str = ""


def with_score(note: str, score_line: str) -> str:
    """The description `note` with this line first, in place of an earlier score."""
    first, _, rest = note.partition("\n\n")
    text = rest if first.startswith(SCORE_START) else note
    return f"{score_line}\n\n{text}" if text else score_line


class Clock:
    """Unix times in ms that never repeat.

    A store keeps one row for each (key, time, step, value). So a row that is sent twice, because
    a crash came between sending and noting it, is stored once; and two values are two rows.
    """

    def __init__(self) -> None:
        self._last = 0

    def after(self, at_ms: int) -> None:
        """Let every time from now on be later than this one."""
        self._last = max(self._last, at_ms)

    def now_ms(self) -> int:
        self._last = max(self._last + 1, int(time.time() * 1000))
        return self._last
