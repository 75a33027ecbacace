"""Mistakes that a response marks itself, apart from those that it does not.

A policy that checks its own steps may write that a step is wrong. A critic that has learned to read
such checks finds these mistakes without seeing any: only the others show that it sees the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.config.data import GeneratedSource
from vapo.diagnostics.value_truth.mistakes import (
    Outcomes,
    Responses,
    first_clear_fall,
    largest_fall,
)
from vapo.prompts.hidden_states import OWN_CHECKS
from vapo.types import Rollout


@dataclass(frozen=True)
class Found:
    """Of `num` mistakes the critic's value falls most at `found`."""

    found: int = 0
    num: int = 0

    def __str__(self) -> str:
        return f"{self.found} of {self.num}"


@dataclass(frozen=True)
class MistakesByMark:
    """First mistakes whose own check says so, those whose check says that the step is right, and
    those whose step has no check, as everywhere on a task without checks."""

    marked: Found = Found()
    unmarked: Found = Found()
    unchecked: Found = Found()

    def __str__(self) -> str:
        if self.marked.num + self.unmarked.num == 0:
            return "the task does not tell whether responses mark their mistakes themselves"
        unchecked = f", {self.unchecked} without a check" if self.unchecked.num else ""
        return f"{self.marked} that the response marks itself, {self.unmarked} unmarked{unchecked}"


def mistakes_by_mark(prompts: Sequence[Responses], outcomes: Outcomes) -> MistakesByMark:
    """The counts over all responses with a clear fall of the truth."""
    names = {True: "marked", False: "unmarked", None: "unchecked"}
    found = {field.name: [0, 0] for field in fields(MistakesByMark)}
    for steps in (steps for own in prompts for steps in own):
        place = first_clear_fall(steps, outcomes)
        if place is not None:
            fall = largest_fall(steps)
            counts = found[names[steps[place + 1].is_marked]]
            counts[0] += fall is not None and fall[0] == place
            counts[1] += 1
    return MistakesByMark(**{name: Found(*counts) for name, counts in found.items()})


def own_mark(
    config: FitConfig, rollout: Rollout, num_tokens: int, tokenizer: PreTrainedTokenizerBase
) -> bool | None:
    """Whether the check that ends so many tokens of the response calls its step wrong; None where
    there is none, or the task has no checks."""
    source = config.data.train
    task = source.task if isinstance(source, GeneratedSource) else None
    own_check = OWN_CHECKS.get(str(task))
    if own_check is None or not all(rollout.is_sampled):
        return None
    return own_check(str(tokenizer.decode(list(rollout.response_ids[:num_tokens]))))
