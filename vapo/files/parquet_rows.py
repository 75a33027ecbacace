"""Reads Parquet files with a limit on the bytes they unpack to, so that none fills the memory.

A value that is written once may be in a million rows, so a file's size says little. Columns of
possibly long texts are read as they are stored, as indices into a dictionary. They become texts a
few rows at a time, once the size of these rows is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vapo.errors import UserError
from vapo.files.long_lines import MOST_ROW_BYTES
from vapo.files.row_values import check_names, shortest_float
from vapo.files.whole_files import check_regular_file

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as parquet


MOST_BYTES = 512 * 2**20
MOST_TIMES = 100
"""A file's rows together may hold `MOST_BYTES`, or this many times the file's size if that is more.
"""

_BATCH_ROWS = 1024
_AT_ONCE = 64 * 2**20
_VALUE_BYTES, _ITEM_BYTES = 32, 8  # of a column's value and of a list's item, without its text


def parquet_rows(path: Path, *, own_digits: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as dicts of Python values.

    Args:
        own_digits: whether numbers of float16 and float32 get the fewest digits that identify them:
            0.1 and not 0.10000000149011612. It takes time, and arithmetic does not need it.

    Raises: UserError: the file cannot be read, has two columns of one name, or its rows are too
        large.
    """
    with opened(path) as file:
        for batch in checked_batches(file, path):
            yield from plain_rows(batch) if own_digits else batch.to_pylist()


def plain_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch as dicts. Numbers of float16 and float32 get the fewest digits
    that identify them."""
    rows: list[dict[str, Any]] = batch.to_pylist()
    for name, shortened in narrow_columns(batch.schema).items():
        for row in rows:
            row[name] = shortened(row[name])
    return rows


def read_whole(path: Path) -> pa.Table:
    """Return all rows of a Parquet file as a table.

    Raises: UserError: what `parquet_rows` raises.
    """
    import pyarrow as pa

    with opened(path) as file:
        schema = _plain_schema(file.schema_arrow)
        return pa.Table.from_batches(checked_batches(file, path), schema)


def column_names(path: Path) -> list[str]:
    """Return the names of a Parquet file's columns. No rows are read.

    Raises: UserError: the file cannot be read.
    """
    with opened(path) as file:
        return list(file.schema_arrow.names)


@contextmanager
def opened(path: Path) -> Iterator[parquet.ParquetFile]:
    """Open a Parquet file in the block, with long text columns as dictionary indices.

    Raises: UserError: it cannot be read, or has columns that dicts of Python values cannot have.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    check_regular_file(path)
    try:
        with parquet.ParquetFile(path) as looked_at:
            _check_columns(looked_at.schema_arrow, path)
            texts = _texts(looked_at)
        with parquet.ParquetFile(path, read_dictionary=texts) as looked_at:
            short = _short_texts(looked_at, texts)
        with parquet.ParquetFile(path, read_dictionary=sorted({*texts} - short)) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error!s:.200})") from None


def _texts(file: parquet.ParquetFile) -> list[str]:
    """Return the paths of the columns that can be read as indices into a dictionary of texts."""
    schema, columns = file.schema, list(_column_chunks(file))
    delta_encoded = {
        x.path_in_schema for x in columns if any("DELTA" in name for name in x.encodings)
    }
    leaves = map(schema.column, range(len(schema)))
    is_text = {
        x.path: x.physical_type == "BYTE_ARRAY" and x.logical_type.type != "DECIMAL" for x in leaves
    }
    return [path for path, is_one in is_text.items() if is_one and path not in delta_encoded]


def _short_texts(file: parquet.ParquetFile, texts: Sequence[str]) -> set[str]:
    """Return those of the columns `texts` whose texts are so short that they can be read directly,
    which is faster.

    They have one text in each row, and the rows that are read at a time cannot be too large,
    whichever entries of the dictionaries they have. (A dictionary is complete with the first row.)
    """
    import pyarrow.compute as compute

    schema = file.schema
    leaves = map(schema.column, range(len(schema)))
    single = {x.path for x in leaves if x.max_repetition_level == 0 and "." not in x.path}
    longest = dict.fromkeys((path for path in texts if path in single), 0)
    for group in range(file.num_row_groups if longest else 0):
        for batch in islice(file.iter_batches(1, row_groups=[group], columns=[*longest]), 1):
            for path, column in zip(batch.schema.names, batch.columns, strict=True):
                lengths = compute.binary_length(column.dictionary)
                longest[path] = max(longest[path], compute.max(lengths).as_py() or 0)
    short, room = set[str](), _AT_ONCE // _BATCH_ROWS
    for path, size in longest.items():
        if size <= room:
            short.add(path)
            room -= size
    return short


def _column_chunks(file: parquet.ParquetFile) -> Iterator[Any]:
    """Yield the metadata of each column in each row group. No rows are read."""
    for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
        yield from map(group.column, range(group.num_columns))


def checked_batches(
    file: parquet.ParquetFile, path: Path, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file in small batches, with texts in place of dictionary indices.

    If `columns` is None, all columns are read.

    Raises: UserError: a row or the whole file unpacks to too many bytes.
    """
    max_bytes = max(MOST_BYTES, MOST_TIMES * path.stat().st_size)
    if _least_bytes(file) > max_bytes:
        raise _too_large(path, max_bytes)
    size, num_rows = 0, 0
    for part, part_bytes in _parts_of(file, columns):
        if part.num_rows == 1 and part_bytes > MOST_ROW_BYTES:
            raise UserError(
                f"{path}: row {num_rows + 1} holds {part_bytes / 2**20:,.0f} MiB, and a row may "
                f"hold {MOST_ROW_BYTES / 2**20:.0f}: leave it out, or the column that is so large"
            )
        size, num_rows = size + part_bytes, num_rows + part.num_rows
        if size > max_bytes:
            raise _too_large(path, max_bytes)
        yield part.cast(_plain_schema(part.schema))


def _parts_of(
    file: parquet.ParquetFile, columns: Sequence[str] | None
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield a file's rows in batches small enough to unpack, each with the bytes it unpacks to.

    A batch never spans two row groups, because their dictionaries differ.
    """
    at_once = min(_BATCH_ROWS, max(1, _AT_ONCE // max(_repeated_bytes(file), 1)))
    for group in range(file.num_row_groups):
        for batch in file.iter_batches(at_once, row_groups=[group], columns=columns):
            yield from _parts(batch)


def _too_large(path: Path, max_bytes: int) -> UserError:
    return UserError(
        f"{path}: its rows unpack to more than {max_bytes / 2**20:,.0f} MiB from a file of "
        f"{path.stat().st_size:,} bytes; {MOST_BYTES / 2**20:.0f} MiB, or {MOST_TIMES} times the "
        "file's size, is the most that is read: leave out columns that repeat a long text, or "
        "write the rows as JSON lines"
    )


def _least_bytes(file: parquet.ParquetFile) -> int:
    """Return a lower bound on the bytes of all values, from the metadata at the file's end."""
    chunks = _column_chunks(file)
    return sum(
        max(chunk.total_uncompressed_size, _ITEM_BYTES * chunk.num_values) for chunk in chunks
    )


def _repeated_bytes(file: parquet.ParquetFile) -> int:
    """Return an upper bound on the bytes that one row may repeat from earlier texts.

    Only columns that store differences between texts (DELTA_BYTE_ARRAY) repeat them.
    """
    return sum(
        chunk.total_uncompressed_size
        for chunk in _column_chunks(file)
        if "DELTA_BYTE_ARRAY" in chunk.encodings
    )


def _check_columns(schema: Any, path: Path) -> None:
    """Check that rows as dicts of Python values can have the file's columns.

    If two columns have one name, a dict would have either, by chance. An extension type over texts
    hides how large they are.

    Raises: UserError: two columns have one name, or a column has such a type.
    """
    import pyarrow as pa

    check_names((field.name for field in schema), path)
    for field in schema:
        if isinstance(field.type, pa.BaseExtensionType) and not _is_fixed(field.type.storage_type):
            raise UserError(
                f"{path}: the column {field.name!r} has the type {field.type!s:.80}, which is not "
                f"read: write it as {field.type.storage_type!s:.80}"
            )
        if children := _children(field.type):
            _check_columns(children, path)


def _is_fixed(kind: pa.DataType) -> bool:
    """Whether every value of an Arrow type takes the same number of bytes."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(kind):
        return _is_fixed(kind.value_type)
    return bool(pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind))


def _children(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(place) for place in range(kind.num_fields)]


# ---- sizes --------------------------------------------------------------------------------------


def _parts(batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield a batch, or parts small enough to unpack, each with the bytes it unpacks to.

    A single row is never divided.
    """
    size = sum(map(_unpacked_bytes, batch.columns))
    if size <= _AT_ONCE or batch.num_rows == 1:
        yield batch, size
        return
    half = batch.num_rows // 2
    yield from _parts(batch.slice(0, half))
    yield from _parts(batch.slice(half))


def _unpacked_bytes(values: pa.Array, each: int = _VALUE_BYTES) -> int:
    """Return about how many bytes the values take as Python objects. A text counts once per row.

    `each` is the size of a value without its text.
    """
    import pyarrow as pa
    import pyarrow.compute as compute

    kind, num_own_bytes = values.type, each * len(values)
    if pa.types.is_dictionary(kind):
        if not _has_length(kind.value_type):
            return num_own_bytes
        lengths = compute.binary_length(values.dictionary).cast(pa.int64())
        return num_own_bytes + (compute.sum(lengths.take(values.indices)).as_py() or 0)
    if _has_length(kind):
        return num_own_bytes + (
            compute.sum(compute.binary_length(values).cast(pa.int64())).as_py() or 0
        )
    if pa.types.is_struct(kind):
        inner: list[pa.Array] = values.flatten()
    elif pa.types.is_map(kind):
        first, end = values.offsets[0].as_py(), values.offsets[-1].as_py()
        inner = [part.slice(first, end - first) for part in (values.keys, values.items)]
    else:
        inner = [values.flatten()] if pa.types.is_nested(kind) else []
    return num_own_bytes + sum(_unpacked_bytes(part, _ITEM_BYTES) for part in inner)


def _has_length(kind: pa.DataType) -> bool:
    import pyarrow as pa

    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(is_text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


# ---- types --------------------------------------------------------------------------------------


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    import pyarrow as pa

    return pa.schema(map(_plain_field, schema), schema.metadata)


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(_plain_type(field.type))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return an Arrow type with each dictionary type in it replaced by the type of its values."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct(list(map(_plain_field, _children(kind))))
    if pa.types.is_map(kind):
        return pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    return pa.large_list(_plain_field(kind.value_field)) if pa.types.is_large_list(kind) else kind


def narrow_columns(schema: pa.Schema) -> dict[str, Callable[[Any], Any]]:
    """Return, for each column with float16 or float32 numbers, a function that gives its values the
    fewest digits."""
    columns = {field.name: _narrowing(field.type) for field in schema}
    return {name: shortened for name, shortened in columns.items() if shortened is not None}


def _narrowing(kind: Any) -> Callable[[Any], Any] | None:
    """Return a function that gives values of an Arrow type the fewest digits, or None."""
    import pyarrow as pa

    width = {pa.float16(): "float16", pa.float32(): "float32"}.get(kind)
    if width is not None:
        return lambda number: None if number is None else shortest_float(number, width)
    if pa.types.is_dictionary(kind):
        return _narrowing(kind.value_type)
    if pa.types.is_struct(kind):
        fields = narrow_columns(_children(kind)).items()
        return (
            (lambda x: x and {**x, **{n: narrow(x[n]) for n, narrow in fields}}) if fields else None
        )
    if pa.types.is_map(kind) and (item := _narrowing(kind.item_type)) is not None:
        return lambda entries: entries and [(key, item(value)) for key, value in entries]
    if pa.types.is_nested(kind) and hasattr(kind, "value_type"):
        each = _narrowing(kind.value_type)
        return None if each is None else lambda values: values and list(map(each, values))
    return None
