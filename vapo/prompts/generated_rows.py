"""Rows of generators: the procedural tasks, reasoning_gym; what a curriculum's stages ask for.

`reasoning_gym` is imported only by the sources that need it.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from vapo.config.data import CurriculumStage
from vapo.config.schema import PromptSource
from vapo.errors import UserError
from vapo.prompts import procedural
from vapo.prompts.rows import Row


def _num_generated(source: PromptSource, key: str) -> int:
    if source.num_examples is None:
        raise UserError(f"{key}.num_examples is not set: kind {source.kind!r} needs it")
    return source.num_examples


def procedural_rows(source: PromptSource, key: str) -> list[Row]:
    try:
        generated = procedural.generate(
            source.task,
            source.options,
            num_examples=_num_generated(source, key),
            seed=source.seed,
        )
    except UserError as error:
        message = str(error)
        raise UserError(message if message.startswith(key) else f"{key}.{message}") from None
    name = f"{source.task}[seed {source.seed}]"
    return [
        _row(f"{name}: row {number}", row.problem, row.answer, {}, demonstration=row.demonstration)
        for number, row in enumerate(generated, start=1)
    ]


def reasoning_gym_rows(source: PromptSource, key: str) -> list[Row]:
    gym = _reasoning_gym(source, key)
    size = _num_generated(source, key)
    try:
        dataset = gym.create_dataset(source.task, size=size, seed=source.seed, **source.options)
        entries = [dataset[index] for index in range(size)]
    except Exception as error:  # options are checked by each dataset in its own way
        raise UserError(
            f"{key}.options: reasoning_gym's {source.task} says: {type(error).__name__}: {error}"
        ) from None
    return [
        _row(
            f"{source.task}[seed {source.seed}]: row {number}",
            entry["question"],
            "" if entry["answer"] is None else str(entry["answer"]),
            {"reasoning_gym_dataset": source.task, "entry": entry},
        )
        for number, entry in enumerate(entries, start=1)
    ]


def _row(
    place: str, problem: str, answer: str, metadata: dict[str, Any], **demonstration: str
) -> Row:
    """With the record that a file of these rows has, in the default columns."""
    record = {"prompt": problem, "answer": answer, **demonstration, **metadata}
    return Row(place, problem, answer, metadata=metadata, record=record, **demonstration)


def _reasoning_gym(source: PromptSource, key: str) -> Any:
    """The package, which has the source's dataset."""
    try:
        import reasoning_gym
        import reasoning_gym.factory
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError(
            f"{key}.kind is reasoning_gym, which is not installed: pip install 'vapo[reasoning]'"
        ) from None
    if source.task not in DATASETS:
        close = difflib.get_close_matches(str(source.task), list(DATASETS), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "see reasoning_gym's gallery"
        raise UserError(f"{key}.task: reasoning_gym has no dataset {source.task!r}; {hint}")
    return reasoning_gym


def stage_source(source: PromptSource, index: int, *, key: str) -> PromptSource:
    """The source as one stage of its curriculum asks for it: a later word wins.

    Raises:
        UserError: the level is none of the dataset's curriculum.
    """
    stage = source.curriculum[index]
    by_level = {} if stage.level is None else _options_of_level(source, stage, key)
    options = {**source.options, **by_level, **stage.options}
    return dataclasses.replace(source, options=options, curriculum=[])


def _options_of_level(source: PromptSource, stage: CurriculumStage, key: str) -> dict[str, Any]:
    """What reasoning_gym's own curriculum makes of a level; the options may add what it leaves."""
    gym, level = _reasoning_gym(source, key), stage.level
    assert level is not None
    if not gym.factory.has_curriculum(source.task):
        raise UserError(
            f"{key}.curriculum: reasoning_gym has no levels for {source.task}; give `options`"
        )
    curriculum = gym.factory.create_curriculum(source.task)
    most = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if level > most:
        raise UserError(f"{key}.curriculum: {source.task} has levels 0 to {most}, not {level}")
    curriculum.set_global_level(level)  # an attribute with fewer levels stays at its last
    options = {**source.options, **stage.options}
    try:
        made = dataclasses.asdict(curriculum.generate_configuration(options))
    except Exception as error:  # each dataset's configuration in its own way
        raise UserError(
            f"{key}.curriculum: reasoning_gym's {source.task}, level {level}: "
            f"{type(error).__name__}: {error}"
        ) from None
    return {name: value for name, value in made.items() if name not in ("seed", "size")}
