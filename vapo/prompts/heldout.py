"""Splits held-out prompts off the training sources, or keeps given ones apart from training."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from random import Random

from vapo.config.data import sources_of
from vapo.config.schema import DataConfig
from vapo.errors import UserError
from vapo.prompts.training_set import StagePrompts, TrainingSet, TrainingSource
from vapo.types import Prompt


def without(
    source: TrainingSource, texts: Set[str], *, is_split_off: bool = False
) -> TrainingSource:
    """Return a training source without the prompts whose text is among `texts`.

    Args:
        is_split_off: whether the held-out prompts were split off the training sources.

    Raises: UserError: a stage has no prompt left.
    """
    stages = []
    for stage in source.stages:
        remaining = [prompt for prompt in stage.prompts if prompt.text not in texts]
        if not remaining:
            raise UserError(
                f"{_key(source)}: all {len(stage.prompts)} training prompts are held out too; "
                + (
                    "the source repeats the same prompts: give others, or data.heldout"
                    if is_split_off
                    else "use another source or seed for data.heldout"
                )
            )
        stages.append(replace(stage, prompts=remaining))
    return replace(source, stages=tuple(stages))


def _key(source: TrainingSource) -> str:
    """Return the config key of a training source, which has a name only within a mixture."""
    return f"data.train.sources.{source.name}" if source.name else "data.train"


def interleaved(sets: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """Merge sets of prompts so that any beginning has about each set's overall share."""
    placed = [
        ((2 * index + 1) / len(prompts), number, prompt)
        for number, prompts in enumerate(sets)
        for index, prompt in enumerate(prompts)
    ]
    return [prompt for *_, prompt in sorted(placed, key=lambda item: item[:2])]


def split_off(
    sources: Sequence[TrainingSource], data: DataConfig
) -> tuple[list[TrainingSource], list[Prompt]]:
    """Split `data.heldout_size` prompts off the training sources, in proportion to their weights.

    At least one is taken from each source.

    Returns: the sources with the remaining prompts, and the held-out prompts.

    Raises: UserError: a source has too few prompts.
    """
    turns = TrainingSet(tuple(sources)).turns
    settings = sources_of(data, "train").values()
    training_sources, heldout_sets = [], []
    for index, (source, config) in enumerate(zip(sources, settings, strict=True)):
        size = max(turns.count(index, data.heldout_size), 1)
        train, heldout = _split(source, size, config.seed, total=data.heldout_size)
        training_sources.append(replace(source, stages=(StagePrompts(train),)))
        heldout_sets.append(heldout)
    return training_sources, interleaved(heldout_sets)


def _split(
    source: TrainingSource, size: int, seed: int, *, total: int
) -> tuple[list[Prompt], list[Prompt]]:
    """Split `size` prompts, chosen by the seed, off a source; return training and held-out ones.

    At least one prompt must remain for training. Both keep the source's order.

    Raises: UserError: the source has too few prompts.
    """
    prompts = source.stages[0].prompts
    if len(prompts) <= size:
        key = _key(source)
        share = f", {size} of {key}" if source.name else ""
        raise UserError(
            f"data.heldout_size is {total}{share}, but {key} has {len(prompts)} usable "
            f"prompts: {'' if size == 1 else 'lower it, '}add problems, or set data.heldout"
        )
    order = list(range(len(prompts)))
    Random(f"heldout/{seed}").shuffle(order)
    heldout_indices = set(order[:size])
    train = [prompt for index, prompt in enumerate(prompts) if index not in heldout_indices]
    return train, [prompts[index] for index in sorted(heldout_indices)]
