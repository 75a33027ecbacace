"""Where prompts come from: files, Hugging Face datasets and generators -> `SourceRow`s.

Rows are checked here, so that a malformed one is named by file and line before any model
loads. `datasets` is imported only by the sources that need it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from vapo.config.data import (
    FileSource,
    GeneratedSource,
    HuggingfaceSource,
    JsonlSource,
    ParquetSource,
    ProceduralSource,
    PromptSource,
    ReasoningGymSource,
    VerifiersSource,
)
from vapo.config.nearest_path import nearest_path
from vapo.environments.verifiers_package import check_verifiers_installed
from vapo.errors import UserError
from vapo.prompts import procedural
from vapo.prompts.columns import match_answer, take
from vapo.prompts.generated_rows import (
    check_reasoning_gym,
    procedural_rows,
    reasoning_gym_rows,
    verifiers_rows,
)
from vapo.prompts.procedural_rows import Demonstration
from vapo.prompts.rows import LeftOut, Message, SourceRow, first_of_each, passing
from vapo.system.files import read_line
from vapo.system.hub import read_cache_if_unreachable

_BATCH_ROWS = 1024  # of a Parquet file, so that its first row is there soon


def read_rows(
    source: PromptSource, *, key: str, left_out: LeftOut | None = None
) -> list[SourceRow]:
    """Read all rows of one source; `key` is the source's place in the config, for error messages.

    Raises: UserError: the source is missing or a row is malformed; names file and line.
    """
    left_out = LeftOut() if left_out is None else left_out
    if isinstance(source, FileSource):
        records = read_records(source, key=key)
        rows: Iterable[SourceRow] = (
            _row_from_record(record, place, source, key)
            for place, record in passing(records, source, key, left_out)
        )
    else:
        rows = _generator(source)(source, key)
    if source.deduplicate:
        rows = first_of_each(rows, left_out)
    return list(islice(rows, source.num_examples))


def read_records(source: FileSource, *, key: str) -> Iterator[tuple[str, Any]]:
    """A source's records as they are, each with its place. Raises: UserError: as `read_rows`."""
    return _records(source)(source, key)


def _generator(source: GeneratedSource) -> Callable[[Any, str], list[SourceRow]]:
    if isinstance(source, ProceduralSource):
        return procedural_rows
    return verifiers_rows if isinstance(source, VerifiersSource) else reasoning_gym_rows


def check_source(source: PromptSource, *, key: str) -> None:
    """Check that a source is there and that its first row has the columns, without reading on.

    A hub's dataset is left to `read_rows`, which may have to load it over the network; a
    generator's options are tried on one row.

    Raises: UserError: as `read_rows` does.
    """
    if isinstance(source, ReasoningGymSource):
        check_reasoning_gym(key)
    elif isinstance(source, VerifiersSource):
        check_verifiers_installed(f"{key}.kind")
    elif isinstance(source, ProceduralSource):
        procedural_rows(replace(source, num_examples=1), key)
    elif isinstance(source, FileSource):
        read = _records(source)
        if read is _huggingface_records:
            _check_dataset_path(source.path, key)
            return
        first = islice(read(source, key), 1)
        for place, record in passing(first, source, key, LeftOut()):
            _row_from_record(record, place, source, key)


def _records(source: FileSource) -> Callable[[Any, str], Iterator[tuple[str, Any]]]:
    """Read records; a dataset's id may be replaced by a file, whose suffix decides its kind."""
    file = Path(source.path)
    suffix = file.suffix if isinstance(source, HuggingfaceSource) and not file.is_dir() else ""
    if isinstance(source, JsonlSource) or suffix == ".jsonl":
        return _jsonl_records
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
    raise UserError(f"{key}.path: there is no file {path}{nearest_path(file)}")


def _jsonl_records(source: FileSource, key: str) -> Iterator[tuple[str, Any]]:
    file = _existing_file(source.path, key)
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{file}:{number}"
            try:
                record = read_line(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{place}: not a line of JSON in UTF-8 ({_reason(error)}){_hint(line)}"
                ) from None
            yield place, record


def _reason(error: Exception) -> str:
    """The parser's reason, without its line number, which is not the file's."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, character {error.pos + 1}"
    return str(error)


def _hint(line: bytes) -> str:
    """Guess what kind of file it is from its first bytes or a line's end."""
    if line[:2] == b"\0\0":
        return "; it begins with NUL bytes, as a file that was not written whole: copy it again"
    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line[:2]:
        return "; it is UTF-16: save it as UTF-8"
    if line.startswith(b"\x1f\x8b"):
        return "; it is compressed: unpack it with gunzip"
    if line.startswith(b"PAR1"):
        return "; it is a Parquet file: set kind to parquet"
    if line.strip() in (b"{", b"["):
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


def _parquet_records(source: FileSource, key: str) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    file = _existing_file(source.path, key)
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            records = (
                row for batch in table.iter_batches(_BATCH_ROWS) for row in batch.to_pylist()
            )
            for number, record in enumerate(records, start=1):
                yield f"{file}: row {number}", record
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{key}.path: {file} is not a readable Parquet file ({error})") from None


def _huggingface_records(source: HuggingfaceSource, key: str) -> Iterator[tuple[str, Any]]:
    for number, record in enumerate(_load_dataset(source, key), start=1):
        yield f"{source.path}[{source.split}]: row {number}", record


def _check_dataset_path(path: str, key: str) -> None:
    """A path that is not here is a hub's. Raises: UserError: it is a file of another kind."""
    if not Path(path).exists():
        read_cache_if_unreachable()
    elif path.endswith(".csv"):
        raise UserError(
            f"{key}.path: {path}: CSV is not read; this Python line writes the same rows as JSONL: "
            f"datasets.load_dataset('csv', data_files={path!r})['train']"
            f".to_json({path.removesuffix('.csv') + '.jsonl'!r})"
        )
    elif Path(path).is_file():
        raise UserError(
            f"{key}.path: {path} is a file, but its name ends neither in .jsonl nor in .parquet; "
            f"set {key}.kind to jsonl or parquet"
        )


def _load_dataset(source: HuggingfaceSource, key: str) -> Iterable[Any]:
    import datasets

    path = source.path
    _check_dataset_path(path, key)
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
            f"folder, or a file with kind jsonl or parquet){nearest_path(Path(path))}"
        ) from None
    if is_saved and isinstance(loaded, datasets.DatasetDict):
        if source.split not in loaded:
            splits = [str(split) for split in loaded]
            raise UserError(f"{key}.split: {procedural.nearest(source.split, splits)}")
        loaded = loaded[source.split]
    found: Iterable[Any] = loaded
    return found


def _row_from_record(record: Any, place: str, source: FileSource, key: str) -> SourceRow:
    if not isinstance(record, Mapping):
        raise UserError(f"{place}: a row is an object with columns, this is {_kind(record)}")
    problem = take(record, source.prompt_column, place=place, key=f"{key}.prompt_column")
    value = take(record, source.answer_column, place=place, key=f"{key}.answer_column")
    columns = [source.prompt_column, source.answer_column]
    demonstration: Demonstration | None = None
    if (column := source.demonstration_column) is not None:
        columns.append(column)
        taken = take(record, column, place=place, key=f"{key}.demonstration_column")
        demonstration = _demonstration(taken, f"{place}: {column!r}")
    answer = _answer(value, f"{place}: {columns[1]!r}")
    if source.answer_pattern is not None:
        answer = match_answer(
            answer, source.answer_pattern, place=place, key=f"{key}.answer_pattern"
        )
    return SourceRow(
        place=place,
        problem=_problem(problem, f"{place}: {columns[0]!r}"),
        answer=answer,
        demonstration=demonstration,
        metadata={str(name): v for name, v in record.items() if name not in columns},
        record=record,
    )


def _demonstration(value: Any, where: str) -> Demonstration | None:
    """A worked response, or the policy's turns of an episode as a list of texts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise UserError(f"{where} must be text, a list of turns or null, it is {_kind(value)}")
    if not value:
        raise UserError(f"{where} is a list without a turn")
    for number, turn in enumerate(value, start=1):
        if not isinstance(turn, str):
            raise UserError(f"{where}: turn {number} must be text, it is {_kind(turn)}")
    return tuple(value)


def _problem(value: Any, where: str) -> str | list[Message]:
    if isinstance(value, str):
        if not value.strip():
            raise UserError(f"{where} is empty")
        return value
    if not isinstance(value, list):
        raise UserError(f"{where} must be text or a list of messages, it is {_kind(value)}")
    if not value:
        raise UserError(f"{where} is empty")
    for message in value:
        texts = isinstance(message, Mapping) and (message.get("role"), message.get("content"))
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise UserError(
                f"{where}: each message needs the texts `role` and `content`, this is {message!r}"
            )
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _answer(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    is_number = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, (float, Decimal)) and not math.isfinite(value)):
        raise UserError(f"{where} must be text or a number, it is {_kind(value)}")
    return str(value)


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {value!r:.60}"
