"""What is asked of every format's fields: texts, numbers, and one entry for each token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import repeat
from typing import Any

from vapo.studies.inspection.responses import InspectedResponse
from vapo.system.row_values import value_text

Row = Mapping[str, Any]
PER_TOKEN = (
    *("tokens", "is_sampled", "values", "logprobs", "advantages", "token_rewards", "returns"),
)
_LARGEST = 2**31 - 1  # id of a token
_TYPES: dict[type, set[type]] = {
    float: {float, int, type(None)},
    int: {int},
    str: {str},
    bool: {bool, int, float},
}
_KINDS = {float: "a number", str: "a text", bool: "true or false"}
_KINDS |= {int: f"a whole number from 0 to {_LARGEST}"}
_FLAGS = {True: True, False: False, "true": True, "false": False}  # 1 is True here, 0 is False
_CUT_SHORT = {
    *("length", "max_tokens", "max_length", "max_new_tokens", "max_output_tokens"),  # engines
    *("max_turns", "max_input_tokens", "max_total_tokens"),  # verifiers
    *("turn_length", "turns", "truncated"),  # vapo, slime
}


class RowError(Exception):
    """A row cannot be read; the text says why."""


@dataclass(frozen=True)
class RowPlace:
    """Where a row is, and how its columns are read.

    Args:
        file: as the user gave it.
        table: the name of the table that the file is, or is one of several of.
        groups: a name for the files of a table whose groups have names in common.
        step: what the file's name says.
        rewards: the columns whose sum is the reward; empty: those of the format.
        render: makes one text of a prompt's messages; None: a line `role: content` for each.
    """

    file: str
    row: int
    table: str = ""
    groups: str = ""
    step: int | None = None
    rewards: Sequence[str] = ()
    render: Callable[[Any], str] | None = None

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}"

    def prompt(self, row: Row, key: str) -> str:
        """A text, or the messages of a conversation as one."""
        value = _text_or_messages(row, key)
        return value if isinstance(value, str) else self.rendered(value)

    def rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return conversation(messages) if self.render is None else self.render(messages)

    def step_of(self, row: Row, key: str = "step") -> int | None:
        own = whole_number(row.get(key))
        return self.step if own is None else own

    def response(self, step: int | None, group: object, **fields: Any) -> InspectedResponse:
        """A response of this row.

        Args:
            group: what the responses to its prompt share in one step of a table. It may be as long
                as the prompt, so a digest is kept.
        """
        key = f"{self.groups}\0{step}\0{group}".encode(errors="surrogatepass")
        digest = blake2b(key, digest_size=16).hexdigest()
        return InspectedResponse(
            place=str(self), table=self.table, step=step, group=digest, **fields
        )


def words(row: Row, key: str) -> dict[str, Any]:
    """The fields of a response that say its words: a text, or messages."""
    value = _text_or_messages(row, key)
    return {"response": value} if isinstance(value, str) else words_of(value)


def words_of(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A response of messages. One text is as it was generated; turns and calls of tools are not."""
    only = messages[0] if len(messages) == 1 else {"tool_calls": True}
    is_verbatim = not only.get("tool_calls") and not only.get("reasoning_content")
    return {"response": conversation(messages), "is_verbatim": is_verbatim}


def _text_or_messages(row: Row, key: str) -> str | Sequence[Mapping[str, Any]]:
    value = row.get(key)
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value):
        return value
    raise RowError(f"{key} is {_shown(value)}, neither a text nor a list of messages")


def conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages as text, where no chat template is known; the only message's text alone."""
    if len(messages) == 1:
        return _content_of(messages[0])
    return "\n".join(f"{message.get('role')}: {_content_of(message)}" for message in messages)


def _content_of(message: Mapping[str, Any]) -> str:
    """A message's text, with its reasoning before it and its calls of tools behind it."""
    content = message.get("content")
    if isinstance(content, list):  # parts of a message; a picture has no text
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        content = "".join(part for part in parts if isinstance(part, str))
    said = [message.get("reasoning_content"), content]
    calls = [json.dumps(call, default=str) for call in message.get("tool_calls") or ()]
    return "\n".join(str(part) for part in (*said, *calls) if part)


def given(row: Row, key: str) -> Any:
    """The entry of a column; None where it is null or NaN, which tables write for null."""
    value = row.get(key)
    return None if isinstance(value, float) and math.isnan(value) else value


def row_number(row: Row, key: str) -> float:
    """A finite number; true and false are 1 and 0."""
    value = row.get(key)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RowError(f"{key} is {_shown(value)}, not a finite number")
    return float(value)


def row_reward(row: Row, keys: Sequence[str]) -> float:
    """The sum of some columns; `a.b` is the entry b of the mapping a.

    A column of several may be null or NaN, as where one of TRL's reward functions has no verdict.
    """
    total, counted = 0.0, 0
    for key in keys:
        value: Any = row
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        entry = {key: value}
        if len(keys) == 1 or given(entry, key) is not None:
            total, counted = total + row_number(entry, key), counted + 1
    if not counted:
        raise RowError(f"none of {', '.join(keys)} is a number")
    return total


def whole_number(value: Any) -> int | None:
    """An int, also where a table without ints has made it a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if isinstance(value, int) or value.is_integer() else None


def flag_of(row: Row, key: str) -> bool | None:
    """true or false, also as 1 and 0 or as texts; None where nothing is said.

    Raises: RowError: anything else.
    """
    value = given(row, key)
    said = value.lower() if isinstance(value, str) else value
    if said is None:
        return None
    if not isinstance(said, (str, int, float)) or said not in _FLAGS:
        raise RowError(f"{key} is {_shown(value)}, not true or false")
    return _FLAGS[said]


def is_cut_short(reason: object) -> bool | None:
    """Whether a response ended for its length, by the reason that an engine gave; None: none."""
    return None if reason is None else str(reason).lower() in _CUT_SHORT


def entries(row: Row, key: str, kind: type[Any]) -> tuple[Any, ...] | None:
    """The list of a column as a tuple; None where the row has none.

    Args:
        kind: float: NaN stands for null; int: ids and lengths; bool: also 1 and 0; str.
    """
    value = given(row, key)
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        raise RowError(f"{key} is {_shown(value)}, not a list")
    types = set(map(type, value))
    if types <= _TYPES[kind]:
        if kind is float and types != {float}:
            return tuple(math.nan if x is None else float(x) for x in value)
        if kind in (str, float):
            return tuple(value)
        if kind is bool and set(value) <= {0, 1}:
            return tuple(map(kind, value))
        if kind is int and (not value or (min(value) >= 0 and max(value) <= _LARGEST)):
            return tuple(value)
    place, item = next(
        (i, x)
        for i, x in enumerate(value)
        if type(x) not in _TYPES[kind]
        or (kind is int and not 0 <= x <= _LARGEST)
        or (kind is bool and x not in (0, 1))
    )
    raise RowError(f"{key} has {_shown(item)} at entry {place}, not {_KINDS[kind]}")


def answer_of(row: Row, key: str) -> str | None:
    """A reference answer as text; None where there is none."""
    value = given(row, key)
    return None if value is None else value_text(value)


def check_lists(response: InspectedResponse) -> InspectedResponse:
    """The response without its lists of numbers that are not all finite, which it names instead.

    Only sampled tokens count: an environment's may have no number, and get 0.

    Raises: RowError: lists that do not have one entry for each response token; it names two.
    """
    ids = response.response_ids
    first = None if ids is None else ("response_ids", len(ids))
    changed: dict[str, Any] = {}
    for name in PER_TOKEN:
        found = getattr(response, name)
        if found is None:
            continue
        first = first or (name, len(found))
        if len(found) != first[1]:
            raise RowError(
                f"{name} has {len(found)} entries, and {first[0]} {first[1]}: one for each token "
                "of the response, and none for the prompt"
            )
        if name not in ("tokens", "is_sampled") and not all(map(math.isfinite, found)):
            is_own = response.is_sampled or repeat(True)
            numbers = tuple(x if own else 0.0 for x, own in zip(found, is_own, strict=False))
            changed[name] = numbers if all(map(math.isfinite, numbers)) else None
    if not changed:
        return response
    not_finite = (name for name, numbers in changed.items() if numbers is None)
    return replace(response, **changed, not_finite=(*response.not_finite, *not_finite))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
