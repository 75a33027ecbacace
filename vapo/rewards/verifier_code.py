"""What a host imports for a verifier, and what an answer of its processes has in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from vapo.rewards.hostile_text import guarded, install
from vapo.rewards.own_function import make_python
from vapo.rewards.verifiers import (
    Judgement,
    Verifier,
    VoteTask,
    make_math,
    make_math_verify,
    make_reasoning_gym,
    make_regex,
    math_vote_classes,
)
from vapo.system.process_protocol import Answering, UserCode, printable, reward_of, reward_problem

Text = tuple[str, str, Mapping[str, Any]]
"""Response text, reference answer, metadata."""

Task = Text | VoteTask


@dataclass(frozen=True, kw_only=True)
class VerifierCode(UserCode):
    """A verifier: a user's function, or one of ours, which parses hostile text."""

    kind: str
    pattern: str | None = None
    function: str | None = None
    function_folder: str | None = None
    function_bytes: bytes | None = None
    """A function of the trainer's own notebook or script (`vapo.system.handed_functions`)."""
    percent: str = "either"
    """How `math` takes a percentage."""
    correct: float = 1.0
    """From this reward on a function's number is a correct response's."""

    @property
    def what(self) -> str:
        return f"verifier {self.function or self.kind}"

    def imported(self) -> Callable[[], Answering]:
        """See `UserCode.imported`."""
        kinds: dict[str, Callable[[], Verifier]] = {
            "regex": lambda: make_regex(self.pattern),
            "math": lambda: make_math(self.percent),
            "math_verify": make_math_verify,
            "reasoning_gym": make_reasoning_gym,
            "python": lambda: make_python(
                self.function,
                folder=self.function_folder,
                sent=self.function_bytes,
                correct=self.correct,
            ),
        }
        verifier = kinds[self.kind]()
        # a user's own function may open files and start processes; ours have no reason to
        guard = nullcontext if self.kind == "python" else guarded
        install()

        def answer(task: Task) -> dict[str, Any]:
            with guard():
                if isinstance(task, VoteTask):
                    return {"classes": math_vote_classes(task)}
                return _fields(verifier(*task))

        return lambda: answer

    def checked(self, question: Task, fields: dict[str, Any]) -> dict[str, Any] | None:
        """See `UserCode.checked`: a judgement's fields, or the classes of votes."""
        if isinstance(question, VoteTask):
            size, classes = len(question.responses), fields.get("classes")
            if set(fields) != {"classes"} or not isinstance(classes, list) or len(classes) != size:
                return None
            return fields if all(type(i) is int and 0 <= i < size for i in classes) else None
        reward, extracted = fields.get("reward"), fields.get("extracted")
        is_judgement = (
            set(fields) == {"is_correct", "reward", "extracted"}
            and isinstance(fields["is_correct"], bool)
            and (reward is None or reward_of(reward) is not None)
            and (extracted is None or isinstance(extracted, str))
        )
        return fields if is_judgement else None


def _fields(judgement: Judgement) -> dict[str, Any]:
    """What is said of one response, or the reason why that is no judgement."""
    if judgement.reward is not None:
        if not math.isfinite(judgement.reward):
            return {"failure": "nan"}
        if (problem := reward_problem(judgement.reward)) is not None:
            return {"failure": f"error: {problem}"}
    extracted = judgement.extracted
    return {
        "is_correct": judgement.is_correct,
        "reward": judgement.reward,
        "extracted": None if extracted is None else printable(extracted),
    }
