"""Read the rows of anybody's files: JSON lines, Parquet, and tensors that load without a pickle.

Rows come one by one, so that a million of them are never in memory together. If a row cannot be
read, its number comes with a reason in place of the row.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from hashlib import blake2b
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from vapo.errors import UserError
from vapo.errors.suggestions import nearest_path
from vapo.files.long_lines import MOST_ROW_BYTES, lines_of
from vapo.files.whole_files import check_regular_file
from vapo.studies.inspection.fields import Row
from vapo.user_code.process_protocol import printable

NumberedRow = tuple[int, Row | str]
"""A row's number in the file, counted from 1, and the row, or a text on why it is unreadable."""

_BATCH_ROWS = 256
_PLAIN = {float, int, bool, str, type(None)}
_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".pt")
_SHARD = re.compile(r"(?<![a-z])(?:part|shard|chunk|rank)[-_.]?\d+|\d+-of-\d+", re.IGNORECASE)
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Half a surrogate pair, escaped in JSON or in invalid UTF-8. Whole escaped pairs match too."""
_STEP = re.compile(r"(?:^|[_-])(?:global_)?(?:steps?|completions)[_-]?(\d+)(?=[._-]|$)")


def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """Return the files among the paths, and the files of rollouts in the folders among them.

    Files of a folder are sorted by the numbers in their names.

    Raises: UserError: a path does not exist, is a folder without such files, a file of another
        kind, a pipe or device, or may not be read by this user.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            paths_inside = [inside for inside in path.rglob("*") if not inside.is_dir()]
            tables = [inside for inside in paths_inside if inside.name.endswith(_SUFFIXES[:-1])]
            # beside tables a .pt file is an optimizer's state or the like
            rollout_files = tables or [x for x in paths_inside if x.suffix == ".pt"]
            if not rollout_files:
                raise UserError(f"{path}: the folder has no file of rollouts ({_kinds()})")
            files += sorted(rollout_files, key=_by_numbers)
        elif not path.exists():
            raise UserError(f"{path}: no such file or folder{nearest_path(path)}")
        elif not path.name.endswith(_SUFFIXES):
            raise UserError(f"{path}: rollouts are read from {_kinds()} files, by their names")
        else:
            files.append(path)
    for path in files:
        check_regular_file(path)
        if not os.access(path, os.R_OK):
            raise UserError(f"{path} may not be read by this user; chmod it")
    return files


def _kinds() -> str:
    return f"{', '.join(_SUFFIXES[:-1])} and {_SUFFIXES[-1]}"


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """Return a sort key with which 10.jsonl comes after 9.jsonl."""
    return [(int(digits or -1), text) for text, digits in re.findall(r"(\D*)(\d*)", str(path))]


def step_in_path(path: Path) -> int | None:
    """Return the training step in the name of a file or of its folder; None if there is no step.

    Names are such as step_12/x.jsonl, completions_00012.parquet or 12.pt.
    """
    stem = path.name.partition(".")[0]
    if stem.isdigit():
        return int(stem)
    for name in (stem, path.parent.name):
        if match := _STEP.search(name):
            return int(match.group(1))
    return None


def table_names(files: Sequence[Path], *, user_paths: Iterable[str | Path]) -> list[str]:
    """Return the name of the table that each file belongs to.

    Files are shards of one table if their names say so: part-0001.parquet,
    train-00000-of-00004.parquet, step_3_rank_1.jsonl. Files of one folder are also one table if
    their names have no step, unless the user gave them by name. A file that is alone in its table
    has its own path as the name.

    Args:
        user_paths: the paths that the user gave.
    """
    listed = set(map(Path, user_paths))
    tables = [_table(path, is_listed=path in listed) for path in files]
    num = Counter(tables)
    return [name if num[name] > 1 else str(path) for name, path in zip(tables, files, strict=True)]


def _table(path: Path, *, is_listed: bool) -> str:
    if step_in_path(path) is None and not is_listed:
        return str(path.parent)
    return str(path.with_name(_SHARD.sub(lambda match: numberless(match[0]), path.name)))


def numberless(name: str) -> str:
    """Replace each number by *, so that part-1.parquet and part-2.parquet become part-*.parquet."""
    return re.sub("[0-9]+", "*", name)


def rows_of(path: Path) -> Iterator[NumberedRow]:
    """Yield the rows of a file, each with its number.

    Raises: UserError, while it is iterated: the file cannot be read at all.
    """
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    return _tensor_rows(path) if path.suffix == ".pt" else _json_rows(path)


def _json_rows(path: Path) -> Iterator[NumberedRow]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines_of(lines), start=1):
                if line is None:
                    yield number, f"a line of more than {MOST_ROW_BYTES / 2**20:.0f} MiB"
                elif line.strip():
                    yield number, _row_of(line)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _row_of(line: bytes) -> Row | str:
    try:
        row = json.loads(line)
        if _HALF_CHARACTER.search(line):
            row = _whole_characters(row)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", str(error)).partition(": line")[0]
        return f"not a line of JSON ({reason}){_hint(line)}"
    return row if isinstance(row, dict) else "not a JSON object"


def _whole_characters(value: Any) -> Any:
    """Return the value with `?` for each half of a surrogate pair in its texts.

    Such halves cannot be printed.
    """
    if isinstance(value, str):
        return value if value.isascii() else printable(value)
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(item) for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], (str, dict, list)):
        return list(map(_whole_characters, value))
    return value


def _hint(line: bytes) -> str:
    if line.strip() in (b"{", b"["):
        return "; it is JSON over several lines: write one object on each, as with `jq -c '.[]'`"
    return "" if line.endswith(b"\n") else "; it is the last line: was the file cut short?"


def _parquet_rows(path: Path) -> Iterator[NumberedRow]:
    from vapo.files.parquet_rows import parquet_rows  # it loads pyarrow

    yield from enumerate(parquet_rows(path, own_digits=False), start=1)


def parquet_columns(path: Path) -> list[str]:
    """Return the names of a Parquet file's columns.

    Raises: UserError: it is not a readable Parquet file.
    """
    from vapo.files.parquet_rows import column_names

    return column_names(path)


def parquet_digest(path: Path, columns: Sequence[str]) -> bytes:
    """Return a digest of the contents of some columns of a Parquet file.

    Raises: UserError: it is not a readable Parquet file.
    """
    from vapo.files.parquet_rows import checked_batches, opened

    digest = blake2b(digest_size=16)
    with opened(path) as file:
        for batch in checked_batches(file, path, columns):
            digest.update(batch.serialize())
    return digest.digest()


def _tensor_rows(path: Path) -> Iterator[NumberedRow]:
    """Yield the samples of a slime dump, a pickle that is loaded as weights are: no code runs.

    torch reads the whole file into memory.
    """
    import torch

    try:
        dump = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises pickle's own, beside several others
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(
            f"{path}: torch.load(weights_only=True) refuses it ({reason:.200}). Only tensors, "
            "numbers, texts, lists and dicts are read, because anything else in a pickle may run "
            "code: where you trust the file, load it and write its samples as JSON lines "
            "(docs/inspect.md)"
        ) from None
    samples = _samples(dump) if isinstance(dump, dict) else None
    if samples is None:
        raise UserError(f"{path}: no dump of slime: it has neither `samples` nor `rollout_data`")
    raw, step = dump.get("raw_reward"), dump.get("rollout_id")
    for number, sample in enumerate(samples, start=1):
        if not isinstance(sample, dict):
            yield number, "not a dict"
            continue
        place = sample.get("rollout_position", number - 1)
        more: dict[str, Any] = {"rollout_id": step, "rank": dump.get("rank")}
        if isinstance(raw, list) and place < len(raw):
            more["raw_reward"] = raw[place]
        yield number, _whole_characters({**_as_lists(sample), **more})


def _samples(dump: dict[str, Any]) -> list[Any] | None:
    """Return a dict for each sample of a slime dump, or None if it is not such a dump.

    Older versions write a file for each rank with `rollout_data`, a list for each column. There
    `raw_reward` has the samples of all ranks. If there are several ranks, it is left out here,
    because its entries cannot be matched with samples.
    """
    samples, columns = dump.get("samples"), dump.get("rollout_data")
    if isinstance(samples, list):
        return samples
    if not isinstance(columns, dict) or not isinstance(columns.get("tokens"), list):
        return None
    num = len(columns["tokens"])
    full = {k: v for k, v in columns.items() if isinstance(v, list) and len(v) == num}
    return [dict(zip(full, sample, strict=True)) for sample in zip(*full.values(), strict=True)]


def _as_lists(value: Any) -> Any:
    """Return the value with other libraries' numbers and containers turned into Python's.

    Numbers may be numpy's, a tensor's, decimals or fractions. Lists may be tuples, arrays, tensors
    or columns of tables. A null of pandas becomes None.
    """
    if type(value) in _PLAIN:
        return value
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, Mapping):
        return {key: _as_lists(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        is_plain = set(map(type, value)) <= _PLAIN
        return value if is_plain else [_as_lists(item) for item in value]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, (Real, Decimal)):
        return float(value)
    for name in ("tolist", "to_list", "as_py"):  # numpy and torch; pandas and polars; Arrow
        if callable(convert := getattr(value, name, None)):
            result = convert()
            return result if type(result) is type(value) else _as_lists(result)
    return value


def rows_of_data(data: Any) -> Iterator[NumberedRow]:
    """Yield the rows of a table in memory, each with its number.

    The table is a DataFrame, a `datasets` object, an Arrow table, or any iterable of mappings.

    Raises: UserError: it is of another type.
    """
    if hasattr(data, "itertuples"):  # pandas
        columns = [str(name) for name in data.columns]
        rows: Iterable[Any] = (
            dict(zip(columns, values, strict=True))
            for values in data.itertuples(index=False, name=None)
        )
    elif hasattr(data, "iter_rows"):  # polars
        rows = data.iter_rows(named=True)
    elif hasattr(data, "to_batches"):  # pyarrow
        rows = (row for batch in data.to_batches(_BATCH_ROWS) for row in batch.to_pylist())
    elif isinstance(data, Iterable) and not isinstance(data, (str, bytes, Mapping)):
        rows = data
    else:
        raise UserError(
            f"{type(data).__name__}: give a path, a DataFrame, a datasets.Dataset, or an iterable "
            "of rows, each a mapping of columns to values"
        )
    for number, row in enumerate(rows, start=1):
        if isinstance(row, Mapping):
            yield number, _whole_characters(_as_lists(dict(row)))
        else:
            yield number, f"{type(row).__name__}, not a mapping"
