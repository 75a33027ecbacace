"""Read and check the fields of a row, for all formats: texts, numbers, and lists over tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import repeat
from typing import Any

from vapo.files.row_values import value_text
from vapo.studies.inspection.responses import InspectedResponse

Row = Mapping[str, Any]
PER_TOKEN = (  # fields of `InspectedResponse` with an entry for each response token
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
    """Raised if a row cannot be read. Its text gives the reason."""


@dataclass(frozen=True)
class RowPlace:
    """The place of a row (file and number), and the settings by which its columns are read.

    A format makes the row's `InspectedResponse` by the methods of this class.

    Args:
        file: the file as the user gave it.
        row: the row's number, counted from 1.
        table: the name of the table that this file belongs to.
        groups: a prefix of group names. Rows of two files with the same group name are one group
            only if both files have the same prefix.
        step: the training step in the file's name, if there is one.
        rewards: the columns whose sum is the reward. If empty, the file's format decides which
            column is the reward.
        render: makes one text of a prompt's messages. If None, each message becomes `role:
            content`.
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
        """Return the prompt in the column `key` as text. Messages are rendered."""
        value = _text_or_messages(row, key)
        return value if isinstance(value, str) else self.rendered(value)

    def rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return conversation(messages) if self.render is None else self.render(messages)

    def step_of(self, row: Row, key: str = "step") -> int | None:
        """Return the training step in the column `key`; without one, that in the file's name."""
        row_step = whole_number(row.get(key))
        return self.step if row_step is None else row_step

    def response(self, step: int | None, group: object, **fields: Any) -> InspectedResponse:
        """Make the `InspectedResponse` of this row.

        Args:
            step: the training step.
            group: equal for all responses to one prompt in one step. Only its digest is stored,
                because it may be as long as the prompt.
            fields: the remaining fields of `InspectedResponse`.
        """
        key = f"{self.groups}\0{step}\0{group}".encode(errors="surrogatepass")
        digest = blake2b(key, digest_size=16).hexdigest()
        return InspectedResponse(
            place=str(self), table=self.table, step=step, group=digest, **fields
        )


def text_fields(row: Row, key: str) -> dict[str, Any]:
    """Return the response in the column `key`, a text or messages, as `InspectedResponse`
    fields.
    """
    value = _text_or_messages(row, key)
    return {"response": value} if isinstance(value, str) else message_fields(value)


def message_fields(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields `response` and `is_verbatim` of an `InspectedResponse` made of messages.

    The text counts as it was generated (`is_verbatim`) only if it is a single message that has
    neither tool calls nor a separate field for reasoning.
    """
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
    """Join messages to one text, without a chat template.

    A single message becomes its content alone.
    """
    if len(messages) == 1:
        return _content_of(messages[0])
    return "\n".join(f"{message.get('role')}: {_content_of(message)}" for message in messages)


def _content_of(message: Mapping[str, Any]) -> str:
    """Return a message's reasoning, its text and its tool calls as one text, in this order."""
    content = message.get("content")
    if isinstance(content, list):  # parts of a message; a picture has no text
        texts = (part.get("text") for part in content if isinstance(part, Mapping))
        content = "".join(text for text in texts if isinstance(text, str))
    reasoning = message.get("reasoning_content")
    calls = [json.dumps(call, default=str) for call in message.get("tool_calls") or ()]
    return "\n".join(str(text) for text in (reasoning, content, *calls) if text)


def entry_or_none(row: Row, key: str) -> Any:
    """Return the entry of a column, or None if it is missing, null or NaN.

    Tables write NaN for null.
    """
    value = row.get(key)
    return None if isinstance(value, float) and math.isnan(value) else value


def row_number(row: Row, key: str) -> float:
    """Return the finite number in a column. true and false count as 1 and 0.

    Raises: RowError: the entry is not such a number.
    """
    value = row.get(key)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RowError(f"{key} is {_shown(value)}, not a finite number")
    return float(value)


def row_reward(row: Row, keys: Sequence[str]) -> float:
    """Return a row's reward: the sum of the columns `keys`.

    The key `a.b` means the entry b of the mapping in column a. If there are several columns, some
    may be null or NaN: one of TRL's reward functions may have given no reward.

    Raises: RowError: no column has a number, or one has something else.
    """
    total, num_numbers = 0.0, 0
    for key in keys:
        value: Any = row
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        entry = {key: value}
        if len(keys) == 1 or entry_or_none(entry, key) is not None:
            total, num_numbers = total + row_number(entry, key), num_numbers + 1
    if not num_numbers:
        raise RowError(f"none of {', '.join(keys)} is a number")
    return total


def whole_number(value: Any) -> int | None:
    """Return the value as an int if it is a whole number, even a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if isinstance(value, int) or value.is_integer() else None


def flag_of(row: Row, key: str) -> bool | None:
    """Return the flag in a column, or None if the row has none. 1, 0 and the texts true and false
    count.

    Raises: RowError: the entry is something else.
    """
    value = entry_or_none(row, key)
    flag = value.lower() if isinstance(value, str) else value
    if flag is None:
        return None
    if not isinstance(flag, (str, int, float)) or flag not in _FLAGS:
        raise RowError(f"{key} is {_shown(value)}, not true or false")
    return _FLAGS[flag]


def is_cut_short(reason: object) -> bool | None:
    """Whether an engine's finish reason means that a limit cut the response.

    None if the reason is None.
    """
    return None if reason is None else str(reason).lower() in _CUT_SHORT


def entries(row: Row, key: str, kind: type[Any]) -> tuple[Any, ...] | None:
    """Return the list in a column as a tuple, or None if the row has none.

    Args:
        kind: the type of the items. Float: null becomes NaN. Int: ids or lengths, not negative.
            Bool: 1 and 0 count.

    Raises: RowError: the entry is not a list, or has an item of another type.
    """
    value = entry_or_none(row, key)
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
    """Return the reference answer in a column as text, or None if the row has none."""
    value = entry_or_none(row, key)
    return None if value is None else value_text(value)


def check_lists(response: InspectedResponse) -> InspectedResponse:
    """Check a response's per-token lists, and return it without lists that are not finite.

    The names of dropped lists go into `not_finite`. Only numbers of sampled tokens matter: in a
    list whose other numbers are not finite, all numbers of an environment's tokens become 0.

    Raises: RowError: two lists differ in length. The message names both.
    """
    ids = response.response_ids
    reference = None if ids is None else ("response_ids", len(ids))
    changed: dict[str, Any] = {}
    for name in PER_TOKEN:
        column = getattr(response, name)
        if column is None:
            continue
        reference = reference or (name, len(column))
        if len(column) != reference[1]:
            raise RowError(
                f"{name} has {len(column)} entries, and {reference[0]} {reference[1]}: one for "
                "each token of the response, and none for the prompt"
            )
        if name not in ("tokens", "is_sampled") and not all(map(math.isfinite, column)):
            flags = response.is_sampled or repeat(True)
            pairs = zip(column, flags, strict=False)
            numbers = tuple(x if is_sampled else 0.0 for x, is_sampled in pairs)
            changed[name] = numbers if all(map(math.isfinite, numbers)) else None
    if not changed:
        return response
    not_finite = (name for name, numbers in changed.items() if numbers is None)
    return replace(response, **changed, not_finite=(*response.not_finite, *not_finite))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
