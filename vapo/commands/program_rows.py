"""Write rows that a Python program holds into a file, which a run can read again."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from vapo.errors import UserError
from vapo.files.row_values import (
    RefusedValue,
    check_names,
    narrow_width,
    plain_value,
    shortest_floats,
)
from vapo.prompts.records import plain_dataset


def written_rows(rows: Any, key: str, folder: Path) -> Path:
    """Write rows into a file that is named by their digest, so that a resumed run finds it.

    Args:
        rows: a DataFrame, a `datasets` object, an Arrow table, or an iterable of mappings.
        key: the source's place in the config, for messages.

    Raises: UserError: JSON has no type for a value. The message names its row and column.
    """
    lines = [_line(row, f"{key}: row {n}") for n, row in enumerate(_records(rows, key), start=1)]
    text = "".join(f"{line}\n" for line in lines)
    path = folder / f"{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}.jsonl"
    if not path.exists():  # another process may be reading it
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as aside:
            aside.write(text)
        os.replace(aside.name, path)
    return path


def _line(row: Any, place: str) -> str:
    try:
        columns = dict(row)
    except (TypeError, ValueError):
        kind = type(row).__name__
        raise UserError(f"{place} is of type {kind}: give a mapping of columns to values") from None
    plain: dict[str, Any] = {}
    for column, entry in columns.items():
        try:
            if not isinstance(column, str):
                raise RefusedValue("a name that is not text")
            plain |= plain_value({column: None if _is_nan(entry) else entry})
        except RefusedValue as error:
            raise UserError(
                f"{place}: column {column!a:.60} has {error}: convert it, or leave the column out"
            ) from None
    return json.dumps(plain, ensure_ascii=False)


def _is_nan(entry: Any) -> bool:
    """Whether a value is NaN, which data frames have in the place of null."""
    return isinstance(entry, float) and math.isnan(entry)


def _records(rows: Any, key: str) -> Iterator[Any]:
    """Return an iterator over the rows of a table or of any iterable.

    Raises: UserError: `rows` is neither, or a table has two columns of one name.
    """
    if hasattr(rows, "itertuples"):  # pandas
        check_names(rows.columns, key)
        return _frame_records(rows)
    if hasattr(rows, "iter_rows"):  # polars
        return iter(rows.iter_rows(named=True))
    if hasattr(rows, "to_batches"):  # pyarrow
        return _arrow_records(rows, key)
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping | str | bytes):
        raise UserError(f"{key}: a path, a hub id, or rows, not {type(rows).__name__}")
    return plain_dataset(rows) if hasattr(rows, "features") else iter(rows)


def _frame_records(frame: Any) -> Iterator[dict[Any, Any]]:
    """Yield a pandas DataFrame's rows as dicts.

    Numbers of narrow float types get their shortest digits, which pandas loses.
    """
    widths = {name: narrow_width(str(kind)) for name, kind in frame.dtypes.items()}
    narrow = {name: width for name, width in widths.items() if width is not None}
    for row in frame.to_dict("records"):
        yield {**row, **{name: shortest_floats(row[name], width) for name, width in narrow.items()}}


def _arrow_records(table: Any, key: str) -> Iterator[dict[str, Any]]:
    from vapo.files.parquet_rows import plain_rows

    check_names(table.schema.names, key)
    for batch in table.to_batches():
        yield from plain_rows(batch)
