"""Reads the records of files and Hugging Face datasets, each with a name of its place for messages.

`datasets` and pyarrow are imported only if a source needs them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vapo.config.data import FileSource, HuggingfaceSource, JsonlSource, ParquetSource
from vapo.errors import UserError, about
from vapo.errors.suggestions import nearest_path, suggest_known
from vapo.files.long_lines import MOST_ROW_BYTES, lines_of
from vapo.files.whole_files import check_regular_file, read_line
from vapo.networks.hub import check_dataset_on_hub

_MOST_ARRAY_BYTES = 64 * 2**20
"""A larger file of one JSON array is refused, since it would have to be in memory as a whole."""
_JSON_STARTS = (b"{", b"[")  # of a row, or of an array of rows

Records = Iterator[tuple[str, Any]]


def read_records(source: FileSource, *, key: str) -> Records:
    """Yield a source's records unchanged, each after its place, such as `file.jsonl:3`.

    Args:
        key: the source's key in the config, for messages.

    Raises: UserError: there is no such file or dataset, or it cannot be read; the message names the
        place.
    """
    return _reader(source)(source, key)


def is_on_a_hub(source: FileSource) -> bool:
    """Whether the library `datasets` loads the source, as it does an id of a hub or a folder.

    A path that ends in .jsonl, .json or .parquet and is not a folder is read as a file.
    """
    return _reader(source) is _huggingface_records


def _reader(source: FileSource) -> Callable[[Any, str], Records]:
    """Return the function that reads a source, by its kind.

    If the kind is `huggingface` and the path is not a folder, the suffixes .jsonl, .json and
    .parquet decide instead.
    """
    file = Path(source.path)
    suffix = file.suffix if isinstance(source, HuggingfaceSource) and not file.is_dir() else ""
    if isinstance(source, JsonlSource) or suffix in (".jsonl", ".json"):
        return _json_records
    if isinstance(source, ParquetSource) or suffix == ".parquet":
        return _parquet_records
    return _huggingface_records


def _existing_file(path: str, key: str) -> Path:
    file = Path(path)
    if file.is_file():
        if not os.access(file, os.R_OK):
            raise UserError(f"{key}.path: {path} may not be read by this user; chmod it")
        return file
    if file.is_dir():
        raise UserError(f"{key}.path: {path} is a folder, give a file")
    with about(f"{key}.path"):
        check_regular_file(file)
    raise UserError(f"{key}.path: there is no file {path}{nearest_path(file)}")


# ---- JSON ---------------------------------------------------------------------------------------


def _json_records(source: FileSource, key: str) -> Records:
    file = _existing_file(source.path, key)
    first = _first_byte(file)
    if first not in _JSON_STARTS:
        _check_no_csv(source.path, key)
    if file.suffix == ".json" and first == b"[":
        yield from _array_records(file)
        return
    with file.open("rb") as opened:
        for number, line in enumerate(lines_of(opened), start=1):
            place = f"{file}:{number}"
            if line is None:
                raise UserError(
                    f"{place}: the line has more than {MOST_ROW_BYTES / 2**20:.0f} MiB, the most "
                    "that a row may have: leave the row out, or what makes it so long"
                )
            if line.strip():
                yield place, _value_of(line, place)


def _first_byte(file: Path) -> bytes:
    """Return a file's first byte after whitespace and a UTF-8 byte-order mark.

    Only the first 4096 bytes are read; the result is `b''` if there is no such byte among them.
    """
    with file.open("rb") as opened:
        return opened.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]


def _value_of(line: bytes, place: str) -> Any:
    try:
        return read_line(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{place}: not a line of JSON in UTF-8 ({_reason(error)}){_hint(line)}"
        ) from None


def _array_records(file: Path) -> Records:
    """Yield the items of a file that is one JSON array, each after its place.

    Raises: UserError: the file is too large to be in memory as a whole, or is not JSON.
    """
    if file.stat().st_size > _MOST_ARRAY_BYTES:
        raise UserError(
            f"{file}: one JSON array of more than {_MOST_ARRAY_BYTES / 2**20:.0f} MiB is not read; "
            f"this line writes the same rows as JSON lines: jq -c '.[]' {file} > {file}l"
        )
    try:
        rows = read_line(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        line = f" in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{file}: not a JSON array in UTF-8 ({_reason(error)}{line})") from None
    for number, row in enumerate(rows, start=1):
        yield f"{file}: row {number}", row


def _reason(error: Exception) -> str:
    """Return why JSON cannot be parsed. The parser's line number is left out: it is not the
    file's."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, character {error.colno}"
    return str(error)


def _hint(line: bytes) -> str:
    """Return a guess at what is wrong with a file, from a line that is not JSON, or ""."""
    if line[:2] == b"\0\0":
        return "; it begins with NUL bytes, as a file that was not written whole: copy it again"
    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line[:2]:
        return "; it is UTF-16: save it as UTF-8"
    if line.startswith(b"\x1f\x8b"):
        return "; it is compressed: unpack it with gunzip"
    if line.startswith(b"PAR1"):
        return "; it is a Parquet file: set kind to parquet"
    if line.strip() == b"[":
        return (
            "; it is JSON over several lines: write one object on each, as with `jq -c '.[]'`, or "
            "give the file a name that ends in .json"
        )
    if line.strip() == b"{":
        return "; it is JSON over several lines: write one object on each, as with `jq -c`"
    if b"\r{" in line:
        return "; its lines end with CR alone: convert it, as with `tr '\\r' '\\n'`"
    if not line.endswith(b"\n"):
        return "; it is the last line: was the file cut short?"
    try:
        line.decode()
    except UnicodeDecodeError:
        return "; convert the file, as with `iconv -f LATIN1 -t UTF-8`"
    return ""


# ---- Parquet and datasets -----------------------------------------------------------------------


def _parquet_records(source: FileSource, key: str) -> Records:
    from vapo.files.parquet_rows import parquet_rows  # it loads pyarrow

    file = _existing_file(source.path, key)
    _check_no_csv(source.path, key)
    if _first_byte(file) in _JSON_STARTS:
        raise UserError(f"{key}.path: {source.path} is JSON, not Parquet; set {key}.kind=jsonl")
    with about(f"{key}.path"):
        for number, record in enumerate(parquet_rows(file), start=1):
            yield f"{file}: row {number}", record


def _huggingface_records(source: HuggingfaceSource, key: str) -> Records:
    for number, record in enumerate(plain_dataset(_load_dataset(source, key)), start=1):
        yield f"{source.path}[{source.split}]: row {number}", record


def check_dataset_path(path: str, key: str) -> None:
    """Check a dataset's path. A path that does not exist on this machine is taken to be a hub's id.

    A folder is not looked into.

    Raises: UserError: the path is a file that cannot be read as a dataset; or the hub cannot be
        reached, and its caches have no such dataset.
    """
    if not Path(path).exists():
        with about(f"{key}.path"):
            check_dataset_on_hub(path)
    elif not Path(path).is_dir():
        _check_no_csv(path, key)
        _existing_file(path, key)
        raise UserError(
            f"{key}.path: {path} is a file, but its name ends in none of .jsonl, .json and "
            f".parquet; set {key}.kind to jsonl or parquet"
        )


def _check_no_csv(path: str, key: str) -> None:
    if path.endswith(".csv"):
        raise UserError(
            f"{key}.path: {path}: CSV is not read; this Python line writes the same rows as JSONL: "
            f"datasets.load_dataset('csv', data_files={path!r})['train']"
            f".to_json({path.removesuffix('.csv') + '.jsonl'!r})"
        )


def _load_dataset(source: HuggingfaceSource, key: str) -> Any:
    import datasets

    path = source.path
    check_dataset_path(path, key)
    is_saved = any((Path(path) / f).exists() for f in ("dataset_dict.json", "state.json"))
    loaded: Any
    try:
        if is_saved:
            loaded = datasets.load_from_disk(path)
        else:
            loaded = datasets.load_dataset(path, source.subset, split=source.split)
    except Exception as error:  # every backend of `datasets` raises its own kind
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"{key}.path: cannot load dataset {path!r}, subset {source.subset!r}, split "
            f"{source.split!r}: {reason[0]} (a hub id needs the network; offline, give a local "
            "folder, or a file with kind jsonl or parquet)"
        ) from None
    if is_saved and isinstance(loaded, datasets.DatasetDict):
        if source.split not in loaded:
            splits = [str(split) for split in loaded]
            raise UserError(f"{key}.split: {suggest_known(source.split, splits)}")
        loaded = loaded[source.split]
    return loaded


def plain_dataset(rows: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `datasets` object with Python's types, even if its format is tensors.

    Tensors would lose digits: torch's format makes all floats float32. A transform of the user's
    own still applies.
    """
    from vapo.files.parquet_rows import narrow_columns

    formatted = getattr(rows, "format", None) or {}
    if formatted.get("type") not in (None, "custom"):
        rows = rows.with_format(None, columns=formatted.get("columns"))
    features = getattr(rows, "features", None)
    narrow = narrow_columns(features.arrow_schema) if features else {}
    for row in rows:
        yield {**row, **{name: narrow[name](row[name]) for name in narrow if name in row}}
