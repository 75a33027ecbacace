"""Rows that are the tasks of an environment of the package verifiers."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from vapo.config.data import GeneratedSource
from vapo.environments.verifiers_package import (
    TASK,
    TOOLS,
    load_environment,
    opening_messages,
    tool_schemas,
    tools_text,
)
from vapo.errors import UserError
from vapo.prompts.rows import Message, Row

OPENING = "Begin task {digest}."
"""The user's message of a task that has none: there the environment says more as it begins.

The digest is of the task's data: prompts that are equal count as one problem.
"""


def verifiers_rows(source: GeneratedSource, key: str) -> list[Row]:
    """The environment's tasks, shuffled with the source's seed.

    Of endless ones the first are taken. A task's tools are described in the system message.

    Raises:
        UserError: the environment cannot be loaded, or a task has what is no text.
    """
    environment = load_environment(source.task, source.options, key=f"{key}.task")
    taskset = environment.taskset
    number, seed = source.num_examples, source.seed
    if taskset.bounded:
        view = taskset.shuffle(seed).take(number)
    else:
        view = taskset.take(number).shuffle(seed)
    try:
        tools = tool_schemas(environment)
        tasks = list(view)
    except Exception as error:  # an environment's package may raise anything
        raise UserError(
            f"{key}.task: the tasks of {source.task} cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from None
    return [_row(task, tools, f"{source.task}: task {task.data.idx}") for task in tasks]


def _row(task: Any, tools: list[dict[str, Any]], place: str) -> Row:
    data = task.data.model_dump(mode="json")
    problem = _with_tools(opening_messages(task), tools_text(tools), place)
    if not any(message["role"] == "user" for message in problem):
        problem.append({"role": "user", "content": OPENING.format(digest=_digest(data))})
    answer = getattr(task.data, "answer", "")
    metadata = {TASK: data, TOOLS: [tool["function"]["name"] for tool in tools]}
    answer = answer if isinstance(answer, str) else ""
    record = {"prompt": problem, "answer": answer, **metadata}
    return Row(place, problem, answer, metadata=metadata, record=record)


def _with_tools(messages: list[dict[str, Any]], tools: str, place: str) -> list[Message]:
    for message in messages:
        if not isinstance(message["content"], str):
            raise UserError(f"{place}: a message has content that is no text, which is unsupported")
    has_system = bool(messages) and messages[0]["role"] == "system"
    system = [messages[0]["content"]] if has_system else []
    said = [{"role": m["role"], "content": m["content"]} for m in messages[len(system) :]]
    described = "\n\n".join([*system, *([tools] if tools else [])])
    begun = [{"role": "system", "content": described}] if described else []
    return [*begun, *said]


def _digest(data: dict[str, Any]) -> str:
    content = {name: value for name, value in data.items() if name != "idx"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
