"""Reward functions that were written for TRL or verl, called as those call them.

TRL (`GRPOTrainer`, 1.16) calls `f(prompts=[...], completions=[...], COLUMN=[...], ...)` on a batch
and gets a list of numbers; texts are lists of messages where the prompt is one. verl (0.9,
`NaiveRewardManager`) calls `f(data_source=..., solution_str=..., ground_truth=...,
extra_info=...)` on one response and gets a number or a dict with `score`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vapo.errors import UserError

Called = Callable[[str, str, Mapping[str, Any]], Any]
"""A function of response text, answer and metadata."""

ANSWERS = ("answer", "final_answer", "solution", "ground_truth", "target", "gold", "label")
"""Names of columns with the reference answer."""
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_NOT_GIVEN = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What TRL gives beside columns: of its tokens and its trainer."""
_TEXTS = ("prompt", "completion")
"""Columns that TRL does not hand on."""


def as_called_elsewhere(function: Callable[..., Any], what: str) -> Called | None:
    """A function of response text, answer and metadata that calls `function` as TRL or verl does.

    None for a function of neither: these are recognised by their parameters.

    Args:
        what: the key and the function, for messages.

    Raises: UserError: it is one of TRL's or verl's, but needs what is not there.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in: it has no signature to ask
        return None
    if "completions" in parameters:
        return _of_trl(function, parameters, what)
    if "solution_strs" in parameters:
        raise UserError(f"{what} takes verl's batches: write one that takes solution_str")
    return _of_verl(function, parameters, what) if "solution_str" in parameters else None


def _of_trl(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], what: str
) -> Called:
    if missing := [name for name in _needed(parameters) if name in _NOT_GIVEN]:
        raise UserError(
            f"{what} needs {', '.join(missing)}, which TRL's trainer has and vapo does not: write "
            "one without"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    needed = _needed(parameters)
    # a name with a default has its own meaning where no column has the name
    aliases = [name for name in ANSWERS if name in needed or (takes_all and name not in parameters)]

    def called(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Any:
        prompt = metadata.get("prompt", "")
        is_chat = not isinstance(prompt, str)
        completion = [{"role": "assistant", "content": response_text}] if is_chat else response_text
        columns = {str(name): v for name, v in metadata.items() if name not in _TEXTS}
        given = {
            **dict.fromkeys(aliases, answer),
            **columns,
            "prompts": prompt,
            "completions": completion,
        }
        if absent := [name for name in needed if name not in given]:
            raise TypeError(f"the rows have no column {', '.join(map(repr, absent))}")
        result = function(
            **{name: [v] for name, v in given.items() if takes_all or name in parameters}
        )
        scores = list(result) if isinstance(result, Iterable) else []
        if len(scores) != 1 or isinstance(result, str | Mapping):
            raise TypeError(f"returned {result!r:.80} for one completion, not a list of one number")
        if scores[0] is None:
            raise TypeError("returned None for its completion: every one needs a reward here")
        return _number(scores[0])

    return called


def _of_verl(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], what: str
) -> Called:
    if missing := [name for name in _needed(parameters) if name not in _VERL]:
        raise UserError(
            f"{what} needs {', '.join(missing)} beside what verl gives ({', '.join(_VERL)}): give "
            "these defaults"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def called(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Any:
        given = {
            "data_source": metadata.get("data_source"),
            "solution_str": response_text,
            "ground_truth": answer,
            "extra_info": metadata.get("extra_info") or {},
        }
        result = function(**{n: v for n, v in given.items() if takes_all or n in parameters})
        if not isinstance(result, dict):
            return _number(result)
        if "score" not in result:
            raise TypeError(f"returned a dict without 'score': {result!r:.80}")
        score = _number(result["score"])
        return (float(result["acc"]) >= 1, score) if "acc" in result else score

    return called


def _number(score: Any) -> Any:
    """True and false are 1 and 0 to both, and no verdicts."""
    return float(score) if isinstance(score, bool) else score


def _needed(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [n for n, p in parameters.items() if p.default is p.empty and p.kind in named]
