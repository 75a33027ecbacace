"""Stored rollouts in the plain form that other programs read: a JSON object on each line.

docs/inspect.md describes it; `vapo inspect` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from vapo.rollouts.stored_columns import TURN_COLUMNS
from vapo.system.files import write_whole

_AS_THEY_ARE = ("prompt", "response", "reward", "group", "prompt_ids", "response_ids", "answer")


def write_plain(source: Path, path: Path) -> None:
    """Write the rows of a file of rollouts, whole or not at all."""

    def write(aside: Path) -> None:
        with aside.open("w", encoding="utf-8") as lines, parquet.ParquetFile(source) as table:
            for batch in table.iter_batches(256):
                for row in batch.to_pylist():
                    lines.write(json.dumps(plain_row(row)) + "\n")

    write_whole(path, write)


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A stored row in the plain form; `is_sampled` where an environment has tokens in it."""
    found: dict[str, Any] = {name: row[name] for name in _AS_THEY_ARE}
    found["logprobs"] = row["rollout_logprobs"]
    found["is_truncated"] = row["finish_reason"] != "stop"
    if row["turn_observed"]:
        found["is_sampled"] = list(_sampled(row))
    return {name: value for name, value in found.items() if value is not None}


def _sampled(row: Mapping[str, Any]) -> Iterator[bool]:
    observed, sampled, _ = (row[name] for name in TURN_COLUMNS)
    for before, own in zip(observed, sampled, strict=True):
        yield from (*[False] * before, *[True] * own)
