"""Find the columns of the prompt and of the answer in rows, by the names that are common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vapo.errors import UserError
from vapo.prompts.columns import has_column
from vapo.rewards.foreign_functions import ANSWERS

PROMPTS = ("prompt", "question", "problem", "query", "input", "instruction")
_OPENED = "messages"
_CONVERSATIONS = (_OPENED, "conversations", "conversation")
_OF_VERL = "reward_model.ground_truth"


def prompt_column(record: Mapping[str, Any], *, place: str, key: str) -> str:
    """Return the name of the column that has the problem.

    It has a known name, or is `messages` whose last message is not the assistant's. `place` names
    the rows, and `key` the config key of the column, in errors.

    Raises: UserError: there is no such column. The message lists the columns.
    """
    for name in PROMPTS:
        if name in record:
            return name
    messages: Any = record.get(_OPENED)
    if _is_conversation(messages) and messages[-1].get("role") != "assistant":
        return _OPENED
    for name in _CONVERSATIONS:
        if _is_conversation(record.get(name)):
            raise UserError(
                f"{key}: {place} has no problem of its own: its column {name!r} is a whole "
                "conversation, whose last message is the answer. Write the messages before that "
                f"into a column of their own, as with row['prompt'] = row[{name!r}][:-1], and what "
                "the verifier compares with into a column 'answer'"
            )
    raise _no_column_error(PROMPTS, record, place, key)


def answer_column(record: Mapping[str, Any], *, place: str, key: str) -> str:
    """Return the name of the column that has the reference answer.

    In rows for verl it is inside of `reward_model`. `place` names the rows, and `key` the config
    key of the column, in errors.

    Raises: UserError: there is no such column. The message lists the columns.
    """
    for name in (*ANSWERS, _OF_VERL):
        if has_column(record, name):
            return name
    raise _no_column_error((*ANSWERS, _OF_VERL), record, place, key)


def _is_conversation(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(message, Mapping) for message in value)


def _no_column_error(
    names: Sequence[str], record: Mapping[str, Any], place: str, key: str
) -> UserError:
    return UserError(
        f"{key}: {place} has none of the columns {', '.join(names)}; its columns are "
        f"{', '.join(map(str, record))}: set {key}=ITS_NAME"
    )
