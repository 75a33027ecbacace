"""Reads values from a row's columns: nested ones by a dotted name, answers by a pattern."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vapo.errors import UserError
from vapo.errors.suggestions import suggest_known

PASS_RATE = "pass_rate"


def take(record: Mapping[str, Any], column: str, *, place: str, key: str) -> Any:
    """Return a column's value; `a.b` is field b of column a, `a.0` the first item of its list.

    A column whose own name has the dots takes precedence. `place` names the row, and `key` is the
    config key that names the column, for errors.

    Raises: UserError: there is no such column; it names the row, the config key and all columns.

    >>> take({"prompt": [{"content": "1+1="}]}, "prompt.0.content", place="f:1", key="k")
    '1+1='
    """
    if column in record:
        return record[column]
    value: Any = record
    parent_names: list[str] = []
    for name in column.split("."):
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            raise UserError(
                f"{place}: no column {column!r} ({key}); {_available(value, name, parent_names)}"
            )
        parent_names.append(name)
    return value


def has_column(record: Mapping[str, Any], column: str) -> bool:
    """Whether a row has a column, which may be nested as in `take`."""
    try:
        take(record, column, place="", key="")
    except UserError:
        return False
    return True


def _available(value: Any, name: str, parent_names: list[str]) -> str:
    where = f"in {'.'.join(parent_names)!r}: " if parent_names else ""
    if isinstance(value, Mapping):
        return where + suggest_known(name, [str(key) for key in value])
    if isinstance(value, list):
        return f"{where}a list of {len(value)} items, counted from 0"
    return f"{where}no fields, it is {type(value).__name__}"


def match_answer(text: str, pattern: str, *, place: str, key: str) -> str:
    """Return the first group of the pattern's last match in a text, as the verifier `regex` does.

    Whitespace around it is dropped.

    Raises: UserError: the text does not match, or the group is empty; it names the row.
    """
    groups = [match.group(1) or "" for match in re.finditer(pattern, text)]
    answer = groups[-1].strip() if groups else ""
    if not answer:
        excerpt = text if len(text) <= 60 else f"...{text[-60:]}"
        raise UserError(
            f"{place}: {key} {pattern!r} finds no answer in {excerpt!r}; the pattern may come from "
            f"a file that the config extends: set {key.rpartition('.')[2]}: null if your answers "
            "need none"
        )
    return answer


def pass_rate(record: Mapping[str, Any], *, place: str, key: str) -> float:
    """Return a row's pass rate, from the column that `vapo filter` writes.

    Raises: UserError: the column is missing, or its value is not between 0 and 1.
    """
    if PASS_RATE not in record:
        raise UserError(
            f"{place}: no column {PASS_RATE!r} ({key}.min_pass_rate, {key}.max_pass_rate); "
            "`vapo filter` writes a file that has it"
        )
    rate = record[PASS_RATE]
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
        raise UserError(f"{place}: {PASS_RATE!r} must be a number from 0 to 1, it is {rate!r}")
    return float(rate)
