"""The verifiers. Responses are hostile text: parsed, never evaluated or formatted.

They run in worker processes (`vapo.rewards.worker_pool`), which enforce time and memory limits;
nothing here imports torch, so that a worker starts fast.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from vapo.errors import UserError
from vapo.rewards.answer_text import last_boxed, plain_answer
from vapo.system.extras import install_command
from vapo.system.handed_functions import function_of
from vapo.system.user_functions import import_function

MAX_RESPONSE_CHARS = 200_000
"""Verifiers see at most so many characters of a response: its end, where the answer is."""

FUNCTION_KEY = "rewards.function"

MAX_EXTRACTED_CHARS = 200
"""Longer extracted answers are cut in verdicts and tables (never in the comparison)."""


@dataclass(frozen=True)
class Judgement:
    """A verifier's answer. `reward` None stands for the configured correct / incorrect reward."""

    is_correct: bool
    reward: float | None = None
    extracted: str | None = None


@runtime_checkable
class Verifier(Protocol):
    """Judges one response. May raise, hang or crash: it runs in a process of its own."""

    def __call__(
        self, response_text: str, answer: str, metadata: Mapping[str, Any]
    ) -> Judgement: ...


def exact(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
    """The whole response, stripped, equals the answer."""
    return _compare(response_text.strip(), answer)


def make_regex(pattern: str | None) -> Verifier:
    """The first group of the pattern's last match, stripped, equals the answer.

    Raises:
        UserError: no pattern, it does not compile, or it has no group.
    """
    if not pattern:
        raise UserError("rewards.pattern is not set: verifier `regex` needs it")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"rewards.pattern is {pattern!r}, which does not compile: {error}"
        ) from None
    if compiled.groups == 0:
        raise UserError(
            f"rewards.pattern is {pattern!r}: put the answer's part in parentheses, as in "
            r"'answer: (\d+)'"
        )

    def regex(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
        last = None
        for match in compiled.finditer(response_text):
            last = match.group(1)
        return _compare(None if last is None else last.strip(), answer)

    return regex


def make_math() -> Verifier:
    r"""Make the mathematics verifier: it compares the last `\boxed{...}`, else the plain end.

    The answer is correct if it equals the reference (`vapo.rewards.answers`), and incorrect where
    it is not understood completely, unless it is the reference's own text.
    """
    from vapo.rewards.answer_equality import is_same_answer

    def math(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
        extracted = extract_answer(response_text)
        if not extracted:
            return Judgement(False, extracted=extracted)
        boxed = last_boxed(answer)
        is_correct = is_same_answer(answer if boxed is None else boxed, extracted)
        return Judgement(is_correct, extracted=extracted[:MAX_EXTRACTED_CHARS])

    return math


def extract_answer(response_text: str) -> str | None:
    """math: the answer's text, as it stands; None without one, empty for an empty box."""
    from vapo.rewards.answers import parse_answer

    boxed = last_boxed(response_text)
    if boxed is not None:
        return boxed.strip()

    def is_answer(text: str) -> bool:
        form = parse_answer(text)  # a sentence is not an answer, a word may be one
        return form.kind != "unknown" and not (form.kind == "words" and " " in form.mark)

    return plain_answer(response_text, is_answer)


@dataclass(frozen=True)
class VoteTask:
    """math: responses to one prompt, each with an answer. Which of them give the same one?"""

    responses: tuple[str, ...]


def math_vote_classes(task: VoteTask) -> list[int]:
    """For each response the index of the first with the same answer."""
    from vapo.rewards.answer_equality import vote_classes

    return vote_classes([extract_answer(text) or "" for text in task.responses])


def make_reasoning_gym() -> Verifier:
    """The scorer of the dataset that made the prompt; only full marks are correct.

    The answer is what the response's last `<answer>...</answer>` holds, else all of it.

    Raises:
        UserError: reasoning_gym is not installed.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(
            "rewards.verifier is reasoning_gym, which is not installed: "
            f"{install_command('reasoning')}"
        )

    @lru_cache(maxsize=256)
    def scorer(dataset: str) -> Callable[..., Any]:
        import reasoning_gym

        function: Callable[..., Any] = reasoning_gym.get_score_answer_fn(dataset)
        return function

    def score(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
        if "reasoning_gym_dataset" not in metadata:
            raise ValueError("the prompt is not from a reasoning_gym source")
        extracted = response_text
        end = response_text.rfind("</answer>")
        start = response_text.rfind("<answer>", 0, max(end, 0))
        if start >= 0:
            extracted = response_text[start + len("<answer>") : end]
        extracted = extracted.strip()
        marks = scorer(metadata["reasoning_gym_dataset"])(extracted, metadata["entry"])
        return Judgement(float(marks) >= 1.0 - 1e-6, extracted=extracted[:MAX_EXTRACTED_CHARS])

    return score


def make_python(
    path: str | None, *, folder: str | None = None, sent: bytes | None = None
) -> Verifier:
    """A user's function `f(response_text, answer, metadata)`.

    Args:
        path: as `package.module:function` or `folder/file.py:function`.
        folder: of the config file that names it, looked into before the current folder.
        sent: the function itself, where the process that trains has it in its own `__main__`.

    It returns `bool` (the verdict; the configured reward), or `(bool, float)` (the verdict and
    its own reward). A number alone is refused: whether 0.5 is correct is not ours to guess,
    and the positive-example LM loss imitates what is called correct.

    Raises:
        UserError: not importable, or not a function.
    """
    if sent is None:
        function = import_function(path, key=FUNCTION_KEY, folder=folder)
    else:
        function = function_of(sent, path=path, key=FUNCTION_KEY)

    def python(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
        result = function(response_text, answer, metadata)
        verdict, reward = (
            result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        )
        verdict = verdict.item() if hasattr(verdict, "item") else verdict  # numpy, torch scalars
        if isinstance(verdict, float) and verdict != verdict:
            return Judgement(False, reward=verdict)
        if not isinstance(verdict, bool):
            raise TypeError(f"returned {result!r:.80}, not a bool or (bool, float)")
        return Judgement(verdict, reward=None if reward is None else float(reward))

    return python


def make_verifier(
    kind: str,
    *,
    pattern: str | None = None,
    function: str | None = None,
    folder: str | None = None,
    sent: bytes | None = None,
) -> Verifier:
    """Make the verifier of this name; `function`, `folder` and `sent` as for `make_python`.

    Raises:
        UserError: its settings are missing or unusable.
    """
    if kind == "exact":
        return exact
    if kind == "regex":
        return make_regex(pattern)
    if kind == "math":
        return make_math()
    if kind == "reasoning_gym":
        return make_reasoning_gym()
    if kind == "python":
        return make_python(function, folder=folder, sent=sent)
    raise UserError(
        f"rewards.verifier is {kind!r}: known are exact, regex, math, reasoning_gym, python"
    )


def _compare(extracted: str | None, answer: str) -> Judgement:
    """Equality after stripping; an empty answer is never correct."""
    if not extracted:
        return Judgement(False)
    return Judgement(extracted == answer.strip(), extracted=extracted[:MAX_EXTRACTED_CHARS])
