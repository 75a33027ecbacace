"""The row of one rollout, and the Parquet file of such rows.

`COLUMNS` has each column's name, its Arrow type, and what of the rollout it holds. All files with
rollouts have these rows: those that `vapo rollouts`, `vapo inspect` and a run in progress write,
lines of JSON in the plain form, and saved bad rollouts. docs/rollout_files.md describes them for
other programs; `rollout_rows` checks their contents. The metadata of a file are one JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as parquet

from vapo.errors import UserError, about
from vapo.files.parquet_rows import read_whole
from vapo.files.row_values import value_text
from vapo.files.whole_files import check_regular_file, whole_file
from vapo.user_code.process_protocol import printable

if TYPE_CHECKING:  # a file is looked at before torch is loaded
    from vapo.rollouts.continuations import MeasuredState
    from vapo.types import Rollout, Turn

METADATA_KEY = b"vapo.rollouts"
SCHEMA_VERSION = 4  # 1 had no truth_ columns, 2 no turn_ columns, 3 none from `extracted` on
_IDS, _NUMBERS = pa.list_(pa.int32()), pa.list_(pa.float32())


def _of_turns(entry: Callable[[Turn], Any]) -> Callable[[Rollout], list[Any] | None]:
    """Return a function that lists an entry of each turn of an episode; None for other rollouts."""
    return lambda rollout: list(map(entry, rollout.turns)) if rollout.in_environment else None


def row_text(record: Mapping[str, Any]) -> str:
    """Write a row of data as one line of JSON. A value of a type that JSON lacks becomes a text."""
    try:
        return json.dumps(dict(record), default=value_text)
    except TypeError:  # a key is not a text
        return json.dumps(_with_text_keys(record), default=value_text)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _with_text_keys(item) for name, item in value.items()}
    return list(map(_with_text_keys, value)) if isinstance(value, (list, tuple)) else value


# Columns without a function are not of the rollout: whoever writes the row fills them.
COLUMNS: dict[str, tuple[pa.DataType, Callable[[Rollout], Any] | None]] = {
    "group": (pa.int64(), None),
    "prompt_id": (pa.string(), lambda rollout: rollout.prompt.prompt_id),
    "prompt": (pa.string(), lambda rollout: rollout.prompt.text),
    "prompt_ids": (_IDS, lambda rollout: rollout.prompt.prompt_ids),
    "response": (pa.string(), lambda rollout: rollout.response_text),
    "response_ids": (_IDS, lambda rollout: rollout.response_ids),
    "rollout_logprobs": (_NUMBERS, lambda rollout: rollout.rollout_logprobs),
    "finish_reason": (pa.string(), lambda rollout: rollout.finish_reason.value),
    "is_correct": (pa.bool_(), lambda rollout: rollout.is_correct),
    "reward": (pa.float64(), lambda rollout: rollout.reward),
    "failure": (pa.string(), lambda rollout: rollout.failure),
    "source": (pa.string(), lambda rollout: rollout.prompt.source),
    "answer": (pa.string(), lambda rollout: rollout.prompt.answer),
    "record": (pa.string(), lambda rollout: row_text(rollout.prompt.record)),
    "oracle": (_NUMBERS, None),
    "oracle_state": (pa.list_(pa.string()), None),
    "truth_tokens": (_IDS, None),
    "truth_values": (_NUMBERS, None),
    "truth_noise": (_NUMBERS, None),
    "truth_continuations": (pa.int32(), None),
    "truth_rows": (_IDS, None),
    "turn_observed": (_IDS, _of_turns(lambda turn: turn.num_observed)),
    "turn_sampled": (_IDS, _of_turns(lambda turn: turn.num_sampled)),
    "turn_rewards": (pa.list_(pa.float64()), _of_turns(lambda turn: turn.reward)),
    "extracted": (pa.string(), lambda rollout: rollout.extracted),
    "by_verifier": (pa.string(), lambda rollout: row_text(rollout.by_verifier)),
    "versions": (pa.list_(pa.int64()), lambda rollout: [turn.version for turn in rollout.turns]),
    "updates": (pa.list_(pa.list_(_IDS)), lambda rollout: [turn.updates for turn in rollout.turns]),
    "is_filler": (pa.bool_(), None),
    "baseline_rewards": (pa.float32(), None),
    "step_starts": (pa.list_(pa.bool_()), None),
    "step_values": (_NUMBERS, None),
}
SCHEMA = pa.schema({name: kind for name, (kind, _) in COLUMNS.items()})
_OF_ROLLOUT = {name: value for name, (_, value) in COLUMNS.items() if value is not None}
TURN_COLUMNS = ("turn_observed", "turn_sampled", "turn_rewards")
TRUTH_COLUMNS = ("truth_tokens", "truth_values", "truth_noise", "truth_continuations", "truth_rows")
BATCH_COLUMNS = ("is_filler", "baseline_rewards", "step_starts", "step_values")
"""Fields of a rollout batch that a run keeps beside its rollouts (`RolloutBatch`)."""

_PLAIN_COLUMNS = ("prompt", "response", "reward", "group", "prompt_ids", "response_ids", "answer")


# ---- rows ---------------------------------------------------------------------------------------


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    """Return the columns of `SCHEMA` that the rollout alone decides."""
    return {name: value(rollout) for name, value in _OF_ROLLOUT.items()}


def rollout_table(
    rollouts: Sequence[Rollout],
    groups: Sequence[int],
    other_columns: Sequence[Mapping[str, Any]] | None = None,
) -> pa.Table:
    """Return one row for each rollout, in the columns of `SCHEMA`.

    Args:
        other_columns: for each rollout the columns that it does not decide; None: they are null.
    """
    rows = [
        rollout_row(rollout) | {"group": group, **columns}
        for rollout, group, columns in zip(
            rollouts, groups, other_columns or [{}] * len(rollouts), strict=True
        )
    ]
    return pa.Table.from_pylist(list(map(_printable_texts, rows)), schema=SCHEMA)


def _printable_texts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with texts that UTF-8 can write; a model may have written others."""
    return {name: printable(x) if isinstance(x, str) else x for name, x in row.items()}


def stored_truth(states: Sequence[MeasuredState]) -> dict[str, Any]:
    """Return the truth columns of a row with these measured states; without states all are null."""
    if not states:
        return dict.fromkeys(TRUTH_COLUMNS)
    return {
        "truth_tokens": [state.num_tokens for state in states],
        "truth_values": [state.mean for state in states],
        "truth_noise": [state.noise for state in states],
        "truth_continuations": len(states[0].returns),
        "truth_rows": [state.num_places for state in states],
    }


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in the plain form that `vapo inspect` and other programs read.

    An episode also has `is_sampled` and `token_rewards`. docs/inspect.md describes the form.
    """
    plain: dict[str, Any] = {name: row[name] for name in _PLAIN_COLUMNS}
    plain["logprobs"] = row["rollout_logprobs"]
    plain["is_truncated"] = row["finish_reason"] != "stop"
    if row["turn_observed"]:
        turns = list(zip(*(row[name] for name in TURN_COLUMNS), strict=True))
        plain["is_sampled"] = [x for o, s, _ in turns for x in (*[False] * o, *[True] * s)]
        plain["token_rewards"] = [x for o, s, r in turns for x in (*[0.0] * (o + s - 1), r)]
    return {name: value for name, value in plain.items() if value is not None}


# ---- files --------------------------------------------------------------------------------------


@contextmanager
def table_writer(
    path: Path, metadata: Mapping[str, Any], schema: pa.Schema = SCHEMA
) -> Iterator[parquet.ParquetWriter]:
    """Open a writer of the file in the block. The file is there, whole, when the block ends."""
    schema = schema.with_metadata({METADATA_KEY: json.dumps(dict(metadata)).encode()})
    with (
        whole_file(path) as aside,
        parquet.ParquetWriter(aside, schema, compression="zstd") as writer,
    ):
        yield writer


def write_table(path: Path, table: pa.Table, metadata: Mapping[str, Any]) -> None:
    """Write the file whole, or not at all."""
    with table_writer(path, metadata, table.schema) as writer:
        writer.write_table(table)


def write_plain(source: Path, path: Path) -> None:
    """Write the rows of a file of rollouts as lines of JSON in the plain form, whole or not."""
    with (
        whole_file(path) as aside,
        aside.open("w", encoding="utf-8") as lines,
        parquet.ParquetFile(source) as table,
    ):
        for batch in table.iter_batches(256):
            lines.writelines(json.dumps(plain_row(row)) + "\n" for row in batch.to_pylist())


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
