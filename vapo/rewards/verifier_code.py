"""The code that a verifier's host process runs, and the check of what it answers.

For a user's own function it says how the function is called and what it may return.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from vapo.errors import UserError
from vapo.errors.shown_text import beginning
from vapo.rewards.foreign_functions import ThreeArguments, as_trl_or_verl_function
from vapo.rewards.hostile_text import guarded, install
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
from vapo.user_code.concurrent_answers import awaited
from vapo.user_code.handed_functions import function_of
from vapo.user_code.process_protocol import (
    Answering,
    UserCode,
    printable,
    reward_of,
    reward_problem,
)
from vapo.user_code.user_functions import check_arguments

FUNCTION_KEY = "rewards.function"
_ARGUMENTS = ("response_text", "answer", "metadata")
RETURNS = "a bool, a number or (bool, number)"
_TOLERANCE = 1e-6


def make_python(
    path: str | None,
    *,
    folder: str | None = None,
    function_bytes: bytes | None = None,
    correct: float = 1.0,
) -> Verifier:
    """Make a verifier of a user's function `f(response_text, answer, metadata)`, or of one that was
    written for TRL or verl.

    A parameter that can only be given by name gets the argument of that name.

    Args:
        path: `package.module:function` or `folder/file.py:function`; see `function_of`.
        folder: the folder that a relative path starts from.
        function_bytes: the pickled function, if the trainer's program handed one over.
        correct: the smallest reward of a correct response, if the function returns a number.

    Raises: UserError: the path is not importable, names no function, or names one that takes other
        arguments.
    """
    user_function = function_of(path, function_bytes, key=FUNCTION_KEY, folder=folder)
    label = f"{FUNCTION_KEY} {path}"
    if _yields(user_function):
        raise UserError(f"{label} is a generator: write a function that returns its verdict")
    function = awaited(user_function)
    call = as_trl_or_verl_function(function, label) or _as_vapo_function(function, label)

    def python(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
        return judgement_of(call(response_text, answer, metadata), correct=correct)

    return python


def _yields(function: Any) -> bool:
    """Whether a function, partial, callable object or method is a generator function."""
    while isinstance(function, functools.partial):
        function = function.func
    return any(
        is_generator_function(candidate)
        for candidate in (function, type(function).__call__)
        for is_generator_function in (inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    )


def _as_vapo_function(function: Callable[..., Any], label: str) -> ThreeArguments:
    """Return a function of response text, answer and metadata that passes them to `function`, in
    this order or by these names.

    Raises: UserError: `function` takes them neither way.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built in: it has no signature to ask
        return function
    names = [
        name for name in _ARGUMENTS if name not in getattr(inspect.unwrap(function), "keywords", ())
    ]
    only = inspect.Parameter.KEYWORD_ONLY
    keyword_only = [
        p.name for p in signature.parameters.values() if p.name in names and p.kind is only
    ]
    for keyword_names in ((), keyword_only, names):
        positional_names = [name for name in names if name not in keyword_names]
        with suppress(TypeError):
            signature.bind(*positional_names, **dict.fromkeys(keyword_names))
            break
    else:
        check_arguments(function, label, *_ARGUMENTS)

    def call(*arguments: Any) -> Any:
        values = dict(zip(_ARGUMENTS, arguments, strict=True))
        return function(
            *(values[n] for n in positional_names), **{n: values[n] for n in keyword_names}
        )

    return call


def judgement_of(result: Any, *, correct: float) -> Judgement:
    """Convert what a user's function returned for one response to a judgement.

    A bool is the verdict, a number is the reward, and `(bool, number)` is both. They may be scalars
    of numpy or torch. If there is no bool, a response is correct if its reward is at least
    `correct`, up to a rounding error.

    Raises: TypeError: the result is something else.
    """
    verdict, reward = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    verdict, reward = _plain(verdict), _plain(reward)
    is_number = isinstance(verdict, numbers.Real)
    if reward is None and is_number and not isinstance(verdict, bool):
        verdict, reward = float(verdict) >= correct - _TOLERANCE, verdict
    has_reward = reward is None or isinstance(reward, numbers.Real)
    if not isinstance(verdict, bool) or not has_reward:
        hint = "; return its score" if isinstance(result, dict) else ""
        raise TypeError(f"returned {beginning(repr(result), 80)}, not {RETURNS}{hint}")
    return Judgement(verdict, reward=None if reward is None else float(reward))


def _plain(value: Any) -> Any:
    """Convert a scalar of numpy or torch to Python's; return other values as they are."""
    is_scalar = hasattr(value, "item") and getattr(value, "size", 1) in (1, ())
    try:
        return value.item() if is_scalar or hasattr(value, "numel") else value
    except (TypeError, ValueError, RuntimeError):
        return value


Text = tuple[str, str, Mapping[str, Any]]
"""A response's text, the reference answer and the metadata."""

Task = Text | VoteTask


@dataclass(frozen=True, kw_only=True)
class VerifierCode(UserCode):
    """What a host process needs to run a verifier: a user's function, or one of vapo's own.

    Vapo's own verifiers parse hostile text, so they run `guarded`.
    """

    kind: str
    pattern: str | None = None
    function: str | None = None
    function_folder: str | None = None
    function_bytes: bytes | None = None
    """The pickled function, if the trainer's program handed one over
    (`vapo.user_code.handed_functions`)."""
    percent: str = "either"
    """See `make_math`."""
    correct: float = 1.0
    """See `make_python`."""

    @property
    def what(self) -> str:
        return f"verifier {self.function or self.kind}"

    def imported(self) -> Callable[[], Answering]:
        """Import the verifier; return a function that makes a process's `Answering`."""
        kinds: dict[str, Callable[[], Verifier]] = {
            "regex": lambda: make_regex(self.pattern),
            "math": lambda: make_math(self.percent),
            "math_verify": make_math_verify,
            "reasoning_gym": make_reasoning_gym,
            "python": lambda: make_python(
                self.function,
                folder=self.function_folder,
                function_bytes=self.function_bytes,
                correct=self.correct,
            ),
        }
        verifier = kinds[self.kind]()
        # a user's own function may open files and start processes; our verifiers need not
        guard = nullcontext if self.kind == "python" else guarded
        install()

        def answer(task: Task) -> dict[str, Any]:
            with guard():
                if isinstance(task, VoteTask):
                    return {"classes": math_vote_classes(task)}
                return _fields(verifier(*task))

        return lambda: answer

    def checked(self, question: Task, fields: dict[str, Any]) -> dict[str, Any] | None:
        """Return the fields of an answer if they are a judgement's or those of votes, else None
        (see `UserCode.checked`)."""
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
    """Return a judgement's fields. If its reward is unusable, they are a `failure` alone."""
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
