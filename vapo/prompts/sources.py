"""Reads the rows of prompt sources: files, Hugging Face datasets and generators.

Rows are checked here, so that an error names a malformed row's file and line before any model
loads. `vapo.prompts.records` reads the files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from itertools import islice
from typing import Any

from vapo.config.data import (
    FileSource,
    FunctionSource,
    ProceduralSource,
    PromptSource,
    ReasoningGymSource,
    VerifiersSource,
)
from vapo.environments.verifiers_package import check_verifiers_installed
from vapo.errors import UserError
from vapo.files.row_values import RefusedValue, check_carried, number_text
from vapo.prompts.columns import match_answer, take
from vapo.prompts.generated_rows import check_reasoning_gym, reasoning_gym_rows, verifiers_rows
from vapo.prompts.generators import generated_records
from vapo.prompts.records import check_dataset_path, is_on_a_hub, read_records
from vapo.prompts.rows import Demonstration, LeftOut, Message, SourceRow, first_of_each, passing


def read_rows(
    source: PromptSource, *, key: str, left_out: LeftOut | None = None
) -> list[SourceRow]:
    """Return the rows of one source, at most its `num_examples`.

    Rows of a file with a pass rate outside the source's bounds are dropped, and with `deduplicate`
    all rows but the first of each problem. `left_out` counts them up to the last row that is
    returned. `key` is the source's key in the config, for error messages.

    Raises: UserError: the source is missing or a row is malformed; it names file and line.
    """
    left_out = LeftOut() if left_out is None else left_out
    if isinstance(source, FileSource):
        records = read_records(source, key=key)
        rows: Iterable[SourceRow] = (
            _row_from_record(record, place, source, key)
            for place, record in passing(records, source, key, left_out)
        )
    elif isinstance(source, (FunctionSource, ProceduralSource)):
        rows = _rows_of_generator(source, key)
    elif isinstance(source, VerifiersSource):
        rows = map(_carried, verifiers_rows(source, key))
    else:
        assert isinstance(source, ReasoningGymSource)
        rows = map(_carried, reasoning_gym_rows(source, key))
    if source.deduplicate:
        rows = first_of_each(rows, left_out)
    return list(islice(rows, source.num_examples))


def _rows_of_generator(source: FunctionSource | ProceduralSource, key: str) -> Iterator[SourceRow]:
    """Yield a generator's rows, which have the columns that a file has by default."""
    for place, record in generated_records(source, key):
        demonstration = "demonstration" if "demonstration" in record else None
        columns = FileSource(path="", demonstration_column=demonstration)
        yield _row_from_record(record, place, columns, key)


def check_source(source: PromptSource, *, key: str) -> None:
    """Check that a source exists and, in a file, that its first row has the columns.

    A hub's dataset is not checked here, since it may have to be loaded over the network. A shipped
    task's options are tried on one row; a user's generator is not called.

    Raises: UserError: the source or the package is missing, an option of a procedural task is not
        valid, or the first row is malformed.
    """
    if isinstance(source, ReasoningGymSource):
        check_reasoning_gym(key)
    elif isinstance(source, VerifiersSource):
        check_verifiers_installed(f"{key}.kind")
    elif isinstance(source, ProceduralSource):
        generated_records(replace(source, num_examples=1), key)
    elif isinstance(source, FileSource):
        if is_on_a_hub(source):
            check_dataset_path(source.path, key)
            return
        first = islice(read_records(source, key=key), 1)
        for place, record in passing(first, source, key, LeftOut()):
            _row_from_record(record, place, source, key)


def _row_from_record(record: Any, place: str, source: FileSource, key: str) -> SourceRow:
    """Make a row from a file's record, by the source's columns.

    Raises: UserError: a column is missing or has a value that cannot be used; it names the row.
    """
    if not isinstance(record, Mapping):
        hint = ", an array: write one object on each line, as with `jq -c '.[]'`"
        raise UserError(
            f"{place}: a row is an object with columns, this is {_kind(record)}"
            f"{hint if isinstance(record, list) else ''}"
        )
    problem = take(record, source.prompt_column, place=place, key=f"{key}.prompt_column")
    value = take(record, source.answer_column, place=place, key=f"{key}.answer_column")
    columns = [source.prompt_column, source.answer_column]
    demonstration: Demonstration | None = None
    if (column := source.demonstration_column) is not None:
        columns.append(column)
        turns = take(record, column, place=place, key=f"{key}.demonstration_column")
        demonstration = _demonstration(turns, f"{place}: {column!r}")
    answer = _answer(value, f"{place}: {columns[1]!r}")
    if source.answer_pattern is not None:
        answer = match_answer(
            answer, source.answer_pattern, place=place, key=f"{key}.answer_pattern"
        )
    row = SourceRow(
        place=place,
        problem=_problem(problem, f"{place}: {columns[0]!r}"),
        answer=answer,
        demonstration=demonstration,
        metadata={str(name): v for name, v in record.items() if name not in columns},
        record=record,
    )
    return _carried(row)


def _carried(row: SourceRow) -> SourceRow:
    """Return the row, after checking that it can be sent to processes and written to files.

    Raises: UserError: it cannot; it names the row and the column.
    """
    for column, value in row.record.items():
        try:
            check_carried({column: value})
        except RefusedValue as error:
            raise UserError(
                f"{row.place}: column {column!a:.60} has {error}: change it, or leave it out"
            ) from None
    return row


def _demonstration(value: Any, where: str) -> Demonstration | None:
    """Check a demonstration, and return it: a worked response, an episode's turns, or None.

    Raises: UserError: it has another form.
    """
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
    try:
        return number_text(value)
    except RefusedValue as error:
        raise UserError(f"{where} has {error}: write it as text") from None


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {value!r:.60}"
