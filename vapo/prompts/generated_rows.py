"""Rows of reasoning_gym and of environments of the package verifiers, and a curriculum's stages.

The packages are imported only by sources that need them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
from typing import Any

from vapo.config.data import (
    CurriculumStage,
    GeneratedSource,
    ReasoningGymSource,
    VerifiersSource,
)
from vapo.environments.verifiers_package import (
    TASK,
    TOOLS,
    load_environment,
    opening_messages,
    tool_schemas,
    tools_text,
)
from vapo.errors import UserError
from vapo.errors.suggestions import nearest_names
from vapo.prompts.rows import Message, SourceRow
from vapo.system.installation import install_command

OPENING = "Begin task {digest}."
"""The user's message for a task without one, whose environment says more at its beginning.

The digest of the task's data is in it, because equal prompts count as one problem.
"""


def reasoning_gym_rows(source: ReasoningGymSource, key: str) -> list[SourceRow]:
    """Return the rows of a dataset of reasoning_gym. `key` is the source's config key, for errors.

    An entry without an answer, which its own verifier scores, has an empty one.

    Raises: UserError: the package is missing, or the dataset or an option is not valid.
    """
    gym = _reasoning_gym(source, key)
    size = source.num_examples
    try:
        dataset = gym.create_dataset(source.task, size=size, seed=source.seed, **source.options)
        entries = [dataset[index] for index in range(size)]
    except Exception as error:  # options are checked by each dataset in its own way
        raise UserError(
            f"{key}.options: reasoning_gym's {source.task} says: {type(error).__name__}: {error}"
        ) from None
    rows = []
    for number, entry in enumerate(entries, start=1):
        place = f"{source.task}[seed {source.seed}]: row {number}"
        answer = "" if entry["answer"] is None else str(entry["answer"])
        metadata = {"reasoning_gym_dataset": source.task, "entry": entry}
        record = {"prompt": entry["question"], "answer": answer, **metadata}
        rows.append(SourceRow(place, entry["question"], answer, metadata=metadata, record=record))
    return rows


def verifiers_rows(source: VerifiersSource, key: str) -> list[SourceRow]:
    """Return the tasks of an environment of the package verifiers, shuffled with the source's seed.

    At most `num_examples` are used; if the tasks are endless, these are the first ones. The
    environment's tools are described in the system message. A task without a user's message gets
    `OPENING`, and one without an answer as text an empty answer.

    Raises: UserError: the environment cannot be loaded, or a task has content that is not text.
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
    return [_task_row(task, tools, f"{source.task}: task {task.data.idx}") for task in tasks]


def _task_row(task: Any, tools: list[dict[str, Any]], place: str) -> SourceRow:
    data = task.data.model_dump(mode="json")
    problem = _with_tools(opening_messages(task), tools_text(tools), place)
    if not any(message["role"] == "user" for message in problem):
        problem.append({"role": "user", "content": OPENING.format(digest=_digest(data))})
    answer = getattr(task.data, "answer", "")
    metadata = {TASK: data, TOOLS: [tool["function"]["name"] for tool in tools]}
    answer = answer if isinstance(answer, str) else ""
    record = {"prompt": problem, "answer": answer, **metadata}
    return SourceRow(place, problem, answer, metadata=metadata, record=record)


def _with_tools(messages: list[dict[str, Any]], tools: str, place: str) -> list[Message]:
    for message in messages:
        if not isinstance(message["content"], str):
            raise UserError(
                f"{place}: the content of a message must be text; other content is unsupported"
            )
    has_system = bool(messages) and messages[0]["role"] == "system"
    system = [messages[0]["content"]] if has_system else []
    turns = [{"role": m["role"], "content": m["content"]} for m in messages[len(system) :]]
    described = "\n\n".join([*system, *([tools] if tools else [])])
    opening = [{"role": "system", "content": described}] if described else []
    return [*opening, *turns]


def _digest(data: dict[str, Any]) -> str:
    content = {name: value for name, value in data.items() if name != "idx"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def check_reasoning_gym(key: str) -> None:
    """Check that reasoning_gym is installed, without importing it.

    Raises: UserError: it is not installed.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise _not_installed(key)


def _not_installed(key: str) -> UserError:
    return UserError(
        f"{key}.kind is reasoning_gym, which is not installed: {install_command('reasoning')}"
    )


def _reasoning_gym(source: ReasoningGymSource, key: str) -> Any:
    """Import reasoning_gym and check that it has the source's dataset."""
    try:
        import reasoning_gym
        import reasoning_gym.factory
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise _not_installed(key) from None
    if source.task not in DATASETS:
        similar = nearest_names(str(source.task), DATASETS)
        hint = f"did you mean {' or '.join(similar)}?" if similar else "see reasoning_gym's gallery"
        raise UserError(f"{key}.task: reasoning_gym has no dataset {source.task!r}; {hint}")
    return reasoning_gym


def stage_source(source: GeneratedSource, index: int, *, key: str) -> GeneratedSource:
    """Return the source with the options of one stage of its curriculum, which take precedence.

    Raises: UserError: reasoning_gym's curriculum for the dataset does not have the stage's level.
    """
    stage = source.curriculum[index]
    by_level = {}
    if isinstance(source, ReasoningGymSource) and stage.level is not None:
        by_level = _options_of_level(source, stage, key)
    options = {**source.options, **by_level, **stage.options}
    return dataclasses.replace(source, options=options, curriculum=[])


def _options_of_level(
    source: ReasoningGymSource, stage: CurriculumStage, key: str
) -> dict[str, Any]:
    """Return the dataset options of a level in reasoning_gym's curriculum, with the options of the
    source and the stage."""
    gym, level = _reasoning_gym(source, key), stage.level
    assert level is not None
    if not gym.factory.has_curriculum(source.task):
        raise UserError(
            f"{key}.curriculum: reasoning_gym has no levels for {source.task}; give `options`"
        )
    curriculum = gym.factory.create_curriculum(source.task)
    max_level = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if level > max_level:
        raise UserError(f"{key}.curriculum: {source.task} has levels 0 to {max_level}, not {level}")
    curriculum.set_global_level(level)  # an attribute with fewer levels stays at its last
    options = {**source.options, **stage.options}
    try:
        level_options = dataclasses.asdict(curriculum.generate_configuration(options))
    except Exception as error:  # each dataset's configuration in its own way
        raise UserError(
            f"{key}.curriculum: reasoning_gym's {source.task}, level {level}: "
            f"{type(error).__name__}: {error}"
        ) from None
    return {name: value for name, value in level_options.items() if name not in ("seed", "size")}
