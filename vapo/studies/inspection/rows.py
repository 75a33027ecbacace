"""The rows of others' files: JSON lines, Parquet, and tensors that torch loads without a pickle.

Rows come one by one, so that a million of them are never in memory together. Where a row is
no row, its number and a reason come instead of it.
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

from vapo.config.nearest_path import nearest_path
from vapo.errors import UserError
from vapo.studies.inspection.fields import Row
from vapo.system.files import check_regular_file
from vapo.system.long_lines import MOST_ROW_BYTES, lines_of
from vapo.system.process_protocol import printable

NumberedRow = tuple[int, Row | str]
"""A row and its number in the file, from 1 up; a text says why it cannot be read."""

_BATCH_ROWS = 256
_PLAIN = {float, int, bool, str, type(None)}
_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".pt")
_SHARD = re.compile(r"(?<![a-z])(?:part|shard|chunk|rank)[-_.]?\d+|\d+-of-\d+", re.IGNORECASE)
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""As JSON escapes it, or as UTF-8 must not have it; whole characters beyond 16 bits match, too."""
_STEP = re.compile(r"(?:^|[_-])(?:global_)?(?:steps?|completions)[_-]?(\d+)(?=[._-]|$)")


def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files that are named, and those in folders that are, by the numbers in their names.

    Raises: UserError: no such path, nothing in a folder, a kind of file that is not read, a pipe or
        device, or one that this user may not read.
    """
    found: list[Path] = []
    for given in map(Path, paths):
        if given.is_dir():
            paths_inside = [path for path in given.rglob("*") if not path.is_dir()]
            tables = [path for path in paths_inside if path.name.endswith(_SUFFIXES[:-1])]
            # beside tables a .pt file is an optimizer's state or the like
            inside = tables or [path for path in paths_inside if path.suffix == ".pt"]
            if not inside:
                raise UserError(f"{given}: the folder has no file of rollouts ({_kinds()})")
            found += sorted(inside, key=_by_numbers)
        elif not given.exists():
            raise UserError(f"{given}: no such file or folder{nearest_path(given)}")
        elif not given.name.endswith(_SUFFIXES):
            raise UserError(f"{given}: rollouts are read from {_kinds()} files, by their names")
        else:
            found.append(given)
    for path in found:
        check_regular_file(path)
        if not os.access(path, os.R_OK):
            raise UserError(f"{path} may not be read by this user; chmod it")
    return found


def _kinds() -> str:
    return f"{', '.join(_SUFFIXES[:-1])} and {_SUFFIXES[-1]}"


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """10.jsonl comes after 9.jsonl."""
    return [(int(part or -1), text) for text, part in re.findall(r"(\D*)(\d*)", str(path))]


def step_in_path(path: Path) -> int | None:
    """The training step that a file's name, or its folder's, says: step_12/, completions_00012."""
    name = path.name.partition(".")[0]
    if name.isdigit():
        return int(name)
    for part in (name, path.parent.name):
        if match := _STEP.search(part):
            return int(match.group(1))
    return None


def table_names(files: Sequence[Path], *, named: Iterable[str | Path]) -> list[str]:
    """The table that each file is, or is one of several of.

    Shards by their names are one table: part-0001.parquet, train-00000-of-00004.parquet,
    step_3_rank_1.jsonl. So are files of a folder whose names say no step, unless they are `named`.
    """
    apart = set(map(Path, named))
    tables = [_table(path, is_named=path in apart) for path in files]
    num = Counter(tables)
    return [name if num[name] > 1 else str(path) for name, path in zip(tables, files, strict=True)]


def _table(path: Path, *, is_named: bool) -> str:
    if step_in_path(path) is None and not is_named:
        return str(path.parent)
    return str(path.with_name(_SHARD.sub(lambda found: numberless(found[0]), path.name)))


def numberless(name: str) -> str:
    """Names of one form become the same: part-1.parquet and part-2.parquet part-*.parquet."""
    return re.sub("[0-9]+", "*", name)


def rows_of(path: Path) -> Iterator[NumberedRow]:
    """The rows of a file.

    Raises: UserError: the whole file cannot be read.
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
    """Texts with `?` in the place of half a character, which nothing could print or write."""
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
    from vapo.system.parquet_rows import parquet_rows  # it loads pyarrow

    yield from enumerate(parquet_rows(path, own_digits=False), start=1)


def parquet_columns(path: Path) -> list[str]:
    """Raises: UserError: no readable Parquet file."""
    from vapo.system.parquet_rows import column_names

    return column_names(path)


def parquet_digest(path: Path, columns: Sequence[str]) -> bytes:
    """Of what some columns say. Raises: UserError: no readable Parquet file."""
    from vapo.system.parquet_rows import checked_batches, opened

    digest = blake2b(digest_size=16)
    with opened(path) as file:
        for batch in checked_batches(file, path, columns):
            digest.update(batch.serialize())
    return digest.digest()


def _tensor_rows(path: Path) -> Iterator[NumberedRow]:
    """The samples of a slime dump, which is one pickle: read as weights are, so that no code runs.

    torch has the whole file in memory.
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
    """A dict for each sample. Older versions have a file for each rank, and in it `rollout_data`,
    a list for each column.

    There `raw_reward` is that of all ranks; of several it is not known whose entry is whose.
    """
    samples, columns = dump.get("samples"), dump.get("rollout_data")
    if isinstance(samples, list):
        return samples
    if not isinstance(columns, dict) or not isinstance(columns.get("tokens"), list):
        return None
    num = len(columns["tokens"])
    own = {k: v for k, v in columns.items() if isinstance(v, list) and len(v) == num}
    return [dict(zip(own, sample, strict=True)) for sample in zip(*own.values(), strict=True)]


def _as_lists(value: Any) -> Any:
    """Numbers, lists and dicts of Python in the place of others'; None for what is null to pandas.

    Numbers: numpy's, a tensor's, decimals, fractions. Lists: tuples, arrays, tensors, columns.
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
        if callable(converted := getattr(value, name, None)):
            found = converted()
            return found if type(found) is type(value) else _as_lists(found)
    return value


def rows_of_data(data: Any) -> Iterator[NumberedRow]:
    """The rows of a DataFrame, a `datasets` object, an Arrow table, or any iterable of mappings.

    Raises: UserError: it has no rows.
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
            yield number, f"{type(row).__name__}, no mapping"
