"""Reward functions that were written for TRL or verl, called as those call them.

TRL (`GRPOTrainer`, 1.16) calls `f(prompts=[...], completions=[...], COLUMN=[...], ...)` on a batch
and gets a list of numbers; texts are lists of messages where the prompt is one. verl (0.9,
`NaiveRewardManager`) calls `f(data_source=..., solution_str=..., ground_truth=...,
extra_info=...)` on one response and gets a number or a dict with `score`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from vapo.errors import UserError

Called = Callable[[str, str, Mapping[str, Any]], Any]
"""A function of response text, answer and metadata."""

_ANSWERS = ("answer", "solution", "ground_truth", "target", "gold", "label")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_NOT_GIVEN = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What TRL gives beside columns: of its tokens and its trainer."""


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
    if "solution_str" in parameters:
        return _of_verl(function, parameters, what)
    return None


def _of_trl(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], what: str
) -> Called:
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{what} is a coroutine function: write one that waits for it")
    if missing := [name for name in _needed(parameters) if name in _NOT_GIVEN]:
        raise UserError(
            f"{what} needs {', '.join(missing)}, which TRL's trainer has and vapo does not: write "
            "one without"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def called(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Any:
        prompt = metadata.get("prompt", "")
        is_chat = not isinstance(prompt, str)
        completion = [{"role": "assistant", "content": response_text}] if is_chat else response_text
        columns = {name: value for name, value in metadata.items() if name != "prompt"}
        given = {
            **dict.fromkeys(_ANSWERS, answer),
            **columns,
            "prompts": prompt,
            "completions": completion,
        }
        if absent := [name for name in _needed(parameters) if name not in given]:
            raise TypeError(f"the rows have no column {', '.join(map(repr, absent))}")
        result = function(
            **{name: [v] for name, v in given.items() if takes_all or name in parameters}
        )
        if not isinstance(result, list | tuple) or len(result) != 1:
            raise TypeError(f"returned {result!r:.80} for one completion, not a list of one number")
        return result[0]

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
            "extra_info": metadata.get("extra_info"),
        }
        result = function(**{n: v for n, v in given.items() if takes_all or n in parameters})
        if not isinstance(result, dict):
            return result
        if "score" not in result:
            raise TypeError(f"returned a dict without 'score': {result!r:.80}")
        return (bool(result["acc"]), result["score"]) if "acc" in result else result["score"]

    return called


def _needed(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [n for n, p in parameters.items() if p.default is p.empty and p.kind in named]
