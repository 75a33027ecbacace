"""Stored rollouts in the plain form that other programs read: a JSON object on each line.

docs/inspect.md describes it; `vapo inspect` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from vapo.files.whole_files import write_whole
from vapo.rollouts.stored_columns import TURN_COLUMNS

_UNCHANGED = ("prompt", "response", "reward", "group", "prompt_ids", "response_ids", "answer")


def write_plain(source: Path, path: Path) -> None:
    """Write a Parquet file of rollouts, `source`, to `path` as one JSON object on each line.

    `path` is written whole or not at all.
    """

    def write(aside: Path) -> None:
        with aside.open("w", encoding="utf-8") as lines, parquet.ParquetFile(source) as table:
            for batch in table.iter_batches(256):
                for row in batch.to_pylist():
                    lines.write(json.dumps(plain_row(row)) + "\n")

    write_whole(path, write)


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored row in the form that other programs read, without entries that are null.

    An episode's row also has `is_sampled` and `token_rewards`, with an entry for each token.
    """
    plain: dict[str, Any] = {name: row[name] for name in _UNCHANGED}
    plain["logprobs"] = row["rollout_logprobs"]
    plain["is_truncated"] = row["finish_reason"] != "stop"
    if row["turn_observed"]:
        turns = list(zip(*(row[name] for name in TURN_COLUMNS), strict=True))
        plain["is_sampled"] = [x for o, s, _ in turns for x in (*[False] * o, *[True] * s)]
        plain["token_rewards"] = [x for o, s, r in turns for x in (*[0.0] * (o + s - 1), r)]
    return {name: value for name, value in plain.items() if value is not None}
