"""Verifiers that are a user's own function: how it must be called, and what it may return."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vapo.errors import UserError
from vapo.rewards.verifiers import Judgement, Verifier
from vapo.system.handed_functions import function_of
from vapo.system.shown_text import beginning
from vapo.system.user_functions import check_arguments

FUNCTION_KEY = "rewards.function"
RETURNS = "a bool, a number or (bool, number)"
_TOLERANCE = 1e-6
_ANSWERS = ("answer", "solution", "ground_truth", "target", "gold", "label")


def make_python(
    path: str | None,
    *,
    folder: str | None = None,
    sent: bytes | None = None,
    correct: float = 1.0,
) -> Verifier:
    """A user's function `f(response_text, answer, metadata)`.

    Args:
        path: as `package.module:function` or `folder/file.py:function`.
        folder: of the config file that names it, looked into before the current folder.
        sent: the function itself, where the process that trains has it in its own `__main__`.
        correct: a number that the function returns is its reward; from `correct` on the response
            is correct.

    Raises:
        UserError: not importable, not a function, or one that is called in another way.
    """
    function = function_of(path, sent, key=FUNCTION_KEY, folder=folder)
    what = f"{FUNCTION_KEY} {path}"
    check_parameters(_parameters(function), what)
    check_arguments(function, what, "response_text", "answer", "metadata")

    def python(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
        return judgement_of(function(response_text, answer, metadata), correct=correct)

    return python


def judgement_of(result: Any, *, correct: float) -> Judgement:
    """What a user's function has said of one response.

    A bool is the verdict, a number a reward, `(bool, number)` both.

    Raises: TypeError: it is something else.
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
    """numpy's and torch's scalars as Python's; what has more elements stays as it is."""
    is_one = hasattr(value, "item") and getattr(value, "size", 1) in (1, ())
    try:
        return value.item() if is_one or hasattr(value, "numel") else value
    except (TypeError, ValueError, RuntimeError):
        return value


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in: it has no signature to ask
        return []
    return [p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def check_parameters(names: Sequence[str], what: str) -> None:
    """Recognise a reward function of TRL or verl, which would be called with the wrong arguments.

    Args:
        what: the key and the function, for the message.

    Raises: UserError: it is one; says what to write beside it.
    """
    name = what.rpartition(":")[2]
    if "completions" in names:
        whose = "TRL calls its reward functions, with lists"
        arguments = [f"{n}=[{_of_trl(n)}]" for n in names]
        hint = (
            "Where it reads messages, write "
            'completions=[[{"role": "assistant", "content": response_text}]].'
        )
        ending = ")[0]"
    elif "solution_str" in names or "data_source" in names:
        whose = "verl calls its reward functions"
        known = {
            "solution_str": "response_text",
            "ground_truth": "answer",
            "data_source": 'metadata.get("data_source")',
            "extra_info": 'metadata.get("extra_info")',
        }
        arguments = [f"{n}={known[n]}" for n in names if n in known]
        hint = 'Where it returns a dict, add ["score"].'
        ending = ")"
    else:
        return
    lines = "".join(f"        {argument},\n" for argument in arguments)
    raise UserError(
        f"{what} takes ({', '.join(names)}), as {whose}; vapo calls f(response_text, answer, "
        "metadata) on one response. Write this beside it, and name it instead:\n\n"
        "def for_vapo(response_text, answer, metadata):\n"
        f"    return {name}(\n{lines}    {ending}\n\n"
        f"It returns {RETURNS}. {hint}"
    )


def _of_trl(name: str) -> str:
    if name == "completions":
        return "response_text"
    if name == "prompts":
        return '""'
    return "answer" if name in _ANSWERS else f'metadata["{name}"]'
