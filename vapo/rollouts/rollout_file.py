"""The Parquet file of scored rollouts: its columns, its metadata, writing and reading it whole.

docs/rollout_files.md describes the format for other programs. One row is one rollout; the metadata
are one JSON text. `rollout_rows` checks the contents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as parquet

from vapo.errors import UserError, about
from vapo.files.parquet_rows import read_whole
from vapo.files.row_values import row_text
from vapo.files.whole_files import check_regular_file, write_whole
from vapo.rollouts.stored_columns import stored_truth, stored_turns
from vapo.user_code.process_protocol import printable

if TYPE_CHECKING:
    from vapo.rollouts.continuations import MeasuredState
    from vapo.types import Rollout

SCHEMA_VERSION = 3  # 1 had no truth_ columns, 2 no turn_ columns
METADATA_KEY = b"vapo.rollouts"
_IDS, _NUMBERS = pa.list_(pa.int32()), pa.list_(pa.float32())
SCHEMA = pa.schema(
    {
        "group": pa.int64(),
        "prompt_id": pa.string(),
        "prompt": pa.string(),
        "prompt_ids": _IDS,
        "response": pa.string(),
        "response_ids": _IDS,
        "rollout_logprobs": _NUMBERS,
        "finish_reason": pa.string(),
        "is_correct": pa.bool_(),
        "reward": pa.float64(),
        "failure": pa.string(),
        "source": pa.string(),
        "answer": pa.string(),
        "record": pa.string(),
        "oracle": _NUMBERS,
        "oracle_state": pa.list_(pa.string()),
        "truth_tokens": _IDS,
        "truth_values": _NUMBERS,
        "truth_noise": _NUMBERS,
        "truth_continuations": pa.int32(),
        "truth_rows": _IDS,
        "turn_observed": _IDS,
        "turn_sampled": _IDS,
        "turn_rewards": pa.list_(pa.float64()),
    }
)


def rollout_table(
    rollouts: Sequence[Rollout],
    groups: Sequence[int],
    oracle_states: Sequence[Sequence[str] | None],
    truths: Sequence[Sequence[MeasuredState]] | None = None,
) -> pa.Table:
    """Return a table with one row for each rollout, in the columns of `SCHEMA`.

    The column `oracle` is null; other programs may fill it.

    Args:
        groups: the number of each rollout's group.
        oracle_states: for each rollout a text for each of its tokens, or None.
        truths: the measured states of each rollout; None: there are none.
    """
    rows = [
        {
            "group": group,
            "prompt_id": rollout.prompt.prompt_id,
            "prompt": rollout.prompt.text,
            "prompt_ids": rollout.prompt.prompt_ids,
            "response": rollout.response_text,
            "response_ids": rollout.response_ids,
            "rollout_logprobs": rollout.rollout_logprobs,
            "finish_reason": rollout.finish_reason.value,
            "is_correct": rollout.is_correct,
            "reward": rollout.reward,
            "failure": rollout.failure,
            "source": rollout.prompt.source,
            "answer": rollout.prompt.answer,
            "record": row_text(rollout.prompt.record),
            "oracle": None,
            "oracle_state": states,
            **stored_truth(measured),
            **stored_turns(rollout),
        }
        for rollout, group, states, measured in zip(
            rollouts, groups, oracle_states, truths or [()] * len(rollouts), strict=True
        )
    ]
    return pa.Table.from_pylist(list(map(printable_texts, rows)), schema=SCHEMA)


def printable_texts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with its texts changed so that UTF-8 can write them.

    A model may write texts that UTF-8 cannot.
    """
    return {name: printable(x) if isinstance(x, str) else x for name, x in row.items()}


def write_table(path: Path, table: pa.Table, metadata: Mapping[str, Any]) -> None:
    """Write a table of rollouts and its metadata to a Parquet file, whole or not at all."""
    schema_metadata = {METADATA_KEY: json.dumps(dict(metadata), sort_keys=True).encode()}
    table = table.replace_schema_metadata(schema_metadata)
    write_whole(path, lambda aside: parquet.write_table(table, aside, compression="zstd"))


def read_table(path: Path, *, key: str) -> tuple[pa.Table, dict[str, Any]]:
    """Return a file's table of rollouts, and its metadata.

    The metadata are empty if another program wrote the file without any.

    Args:
        key: the config key or option that names the file, for messages.

    Raises: UserError: the file is not a readable Parquet file, or one of a later version of the
        schema.
    """
    metadata = read_metadata(path, key=key)
    with about(key):
        return read_whole(path), metadata


def read_metadata(path: Path, *, key: str) -> dict[str, Any]:
    """Return the metadata of a file of rollouts, without reading the rows; empty if it has none.

    `key` is the config key or option that names the file, for messages.

    Raises: UserError: the file is not a readable Parquet file, or one of a later version of the
        schema.
    """
    with _readable(path, key):
        schema = parquet.read_schema(path)
    try:
        metadata: dict[str, Any] = json.loads((schema.metadata or {}).get(METADATA_KEY, b"{}"))
        version = int(metadata.get("schema_version", SCHEMA_VERSION))
    except (ValueError, TypeError, AttributeError):
        raise UserError(
            f"{key} {path}: its metadata {METADATA_KEY.decode()} are not a JSON object"
        ) from None
    if version > SCHEMA_VERSION:
        raise UserError(
            f"{key} {path}: schema version {version}, and this vapo reads up to {SCHEMA_VERSION}"
        )
    return metadata


@contextmanager
def _readable(path: Path, key: str) -> Iterator[None]:
    with about(key):
        check_regular_file(path)
    if not path.exists():
        raise UserError(f"{key} {path}: no such file; `vapo rollouts` writes one")
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{key} {path}: not a readable Parquet file ({error})") from None


def concatenate_tables(paths: Sequence[Path], *, key: str) -> pa.Table:
    """Return the rows of several files that vapo wrote as one table.

    A column that a file lacks is null in its rows. Files of any size are read. `key` is the config
    key or option that names them, for messages.
    """
    tables = []
    for path in paths:
        with _readable(path, key):
            tables.append(parquet.read_table(path))
    return pa.concat_tables(tables, promote_options="default")
