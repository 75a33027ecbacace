"""What is asked of every format's fields: texts, numbers, and one entry for each token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vapo.studies.inspection.responses import InspectedResponse

Row = Mapping[str, Any]
_KINDS = {float: "a finite number", int: "a whole number", str: "a text", bool: "true or false"}
PER_TOKEN = (
    *("tokens", "is_sampled", "values", "logprobs", "advantages", "token_rewards", "returns"),
)


class RowError(Exception):
    """A row cannot be read; the text says why."""


@dataclass(frozen=True)
class Place:
    """Where a row is, and how its columns are read.

    Args:
        file: as the user gave it; groups of different files are different ones.
        step: what the file's name says.
        rewards: the columns whose sum is the reward; empty: those of the format.
        render: makes one text of messages.
    """

    file: str
    row: int
    step: int | None = None
    rewards: Sequence[str] = ()
    render: Callable[[Any], str] | None = None

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}"

    def text(self, row: Row, key: str) -> str:
        return text_of(row, key, self.render)

    def step_of(self, row: Row, key: str = "step") -> int | None:
        own = whole_number(row.get(key))
        return self.step if own is None else own

    def group(self, *parts: object) -> str:
        """A name of the responses to one prompt of one step."""
        return "|".join(map(str, (self.file, *parts)))


def text_of(row: Row, key: str, render: Callable[[Any], str] | None = None) -> str:
    """A text, or the messages of a conversation as one.

    Args:
        render: makes a text of messages; None: a line `role: content` for each.
    """
    value = row.get(key)
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value):
        return conversation(value) if render is None else render(value)
    raise RowError(f"{key} is {_shown(value)}, neither a text nor a list of messages")


def conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages as text, where no chat template is known; the only message's text alone."""
    if len(messages) == 1:
        return content_of(messages[0])
    return "\n".join(f"{message.get('role')}: {content_of(message)}" for message in messages)


def content_of(message: Mapping[str, Any]) -> str:
    """A message's text, with its reasoning before it and its calls of tools behind it."""
    content = message.get("content")
    if isinstance(content, list):  # parts of a message; a picture has no text
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        content = "".join(part for part in parts if isinstance(part, str))
    said = [message.get("reasoning_content"), content]
    calls = [json.dumps(call, default=str) for call in message.get("tool_calls") or ()]
    return "\n".join(str(part) for part in (*said, *calls) if part)


def number_of(row: Row, key: str) -> float:
    """A finite number; true and false are 1 and 0."""
    value = row.get(key)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RowError(f"{key} is {_shown(value)}, not a finite number")
    return float(value)


def reward_of(row: Row, keys: Sequence[str]) -> float:
    """The sum of some columns; `a.b` is the entry b of the mapping a.

    A column of several may be null or NaN, as where one of TRL's reward functions has no verdict.
    """
    total, counted = 0.0, 0
    for key in keys:
        value: Any = row
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        is_none = value is None or (isinstance(value, float) and math.isnan(value))
        if not (is_none and len(keys) > 1):
            total, counted = total + number_of({key: value}, key), counted + 1
    if not counted:
        raise RowError(f"none of {', '.join(keys)} is a number")
    return total


def whole_number(value: Any) -> int | None:
    """An int, also where a table without ints has made it a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if float(value).is_integer() else None


def entries(row: Row, key: str, kind: type[Any]) -> tuple[Any, ...] | None:
    """The list of a column as a tuple; None where the row has none."""
    value = row.get(key)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if not isinstance(value, (list, tuple)):
        raise RowError(f"{key} is {_shown(value)}, not a list")
    kinds = (int, float) if kind is float else (kind,)
    for place, item in enumerate(value):
        if not isinstance(item, kinds) or (kind is float and not math.isfinite(item)):
            raise RowError(f"{key} has {_shown(item)} at entry {place}, not {_KINDS[kind]}")
    return tuple(map(float, value)) if kind is float else tuple(value)


def answer_text(value: Any) -> str | None:
    """A reference answer as text; None where there is none."""
    return None if value is None else str(value)


def check_lengths(response: InspectedResponse) -> InspectedResponse:
    """Every list has one entry for each response token.

    Raises: RowError naming the two that differ.
    """
    ids = response.response_ids
    first = None if ids is None else ("response_ids", len(ids))
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
    return response


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
