"""Rows that are the tasks of an environment of the package verifiers."""

from __future__ import annotations

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

OPENING = "Begin."
"""The user's message of a task that has none: there the environment says more as it begins."""


def verifiers_rows(source: GeneratedSource, key: str) -> list[Row]:
    """The environment's tasks, shuffled with the source's seed; endless ones in their own order.

    A task's tools are described in the system message.

    Raises:
        UserError: the environment cannot be loaded, or a task has what is no text.
    """
    environment = load_environment(source.task, source.options, key=f"{key}.task")
    taskset = environment.taskset
    if not taskset.bounded and source.seed:
        raise UserError(
            f"{key}.seed: the tasks of {source.task} are endless, in an order of their own: set "
            f"{key}.seed=0, and give what they are drawn from in {key}.options"
        )
    view = taskset.shuffle(source.seed) if taskset.bounded else taskset
    try:
        tools = tool_schemas(environment)
        tasks = list(view.take(source.num_examples))
    except Exception as error:  # an environment's package may raise anything
        raise UserError(
            f"{key}.task: the tasks of {source.task} cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from None
    return [_row(task, tools, f"{source.task}: task {task.data.idx}") for task in tasks]


def _row(task: Any, tools: list[dict[str, Any]], place: str) -> Row:
    problem = _with_tools(opening_messages(task), tools_text(tools), place)
    answer = getattr(task.data, "answer", "")
    metadata = {
        TASK: task.data.model_dump(mode="json"),
        TOOLS: [tool["function"]["name"] for tool in tools],
    }
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
    return [*begun, *(said or [{"role": "user", "content": OPENING}])]
