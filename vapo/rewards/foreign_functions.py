"""Calls reward functions that were written for TRL or verl in the way that these call them.

TRL (`GRPOTrainer`, 1.16) calls `f(prompts=[...], completions=[...], COLUMN=[...], ...)` on a batch
and gets a list of numbers; texts are lists of messages where the prompt is one. verl (0.9,
`NaiveRewardManager`) calls `f(data_source=..., solution_str=..., ground_truth=..., extra_info=...)`
on one response and gets a number or a dict with `score`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vapo.errors import UserError

ThreeArguments = Callable[[str, str, Mapping[str, Any]], Any]
"""A function of response text, answer and metadata."""

ANSWERS = ("answer", "final_answer", "solution", "ground_truth", "target", "gold", "label")
"""The usual names of a column with the reference answer."""
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_UNAVAILABLE = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments of TRL that vapo does not have: they come from TRL's trainer."""
_TEXTS = ("prompt", "completion")
"""Columns of a row that TRL does not hand to the function."""


def as_trl_or_verl_function(function: Callable[..., Any], label: str) -> ThreeArguments | None:
    """Return a function of response text, answer and metadata that calls `function` as TRL or verl
    does.

    It is None if the names of `function`'s parameters are neither TRL's nor verl's, or are not
    known, as with some built-in functions.

    Args:
        label: the config key and the function, for messages.

    Raises: UserError: the function needs an argument of TRL or verl that vapo does not have.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in: it has no signature to ask
        return None
    if "completions" in parameters:
        return _trl_function(function, parameters, label)
    if "solution_strs" in parameters:
        raise UserError(f"{label} takes verl's batches: write one that takes solution_str")
    return _verl_function(function, parameters, label) if "solution_str" in parameters else None


def _trl_function(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], label: str
) -> ThreeArguments:
    """Return a function of response text, answer and metadata that calls `function` as TRL does.

    Raises: UserError: `function` needs an argument that only TRL's trainer has.
    """
    if missing := [name for name in _required_names(parameters) if name in _UNAVAILABLE]:
        raise UserError(
            f"{label} needs {', '.join(missing)}, which TRL's trainer has and vapo does not: write "
            "one without"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    required_names = _required_names(parameters)
    # a name with a default has its own meaning where no column has the name
    aliases = [
        name for name in ANSWERS if name in required_names or (takes_all and name not in parameters)
    ]

    def call(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Any:
        prompt = metadata.get("prompt", "")
        is_chat = not isinstance(prompt, str)
        completion = [{"role": "assistant", "content": response_text}] if is_chat else response_text
        columns = {str(name): v for name, v in metadata.items() if name not in _TEXTS}
        arguments = {
            **dict.fromkeys(aliases, answer),
            **columns,
            "prompts": prompt,
            "completions": completion,
        }
        if absent_names := [name for name in required_names if name not in arguments]:
            raise TypeError(f"the rows have no column {', '.join(map(repr, absent_names))}")
        result = function(
            **{name: [v] for name, v in arguments.items() if takes_all or name in parameters}
        )
        scores = list(result) if isinstance(result, Iterable) else []
        if len(scores) != 1 or isinstance(result, str | Mapping):
            raise TypeError(f"returned {result!r:.80} for one completion, not a list of one number")
        if scores[0] is None:
            raise TypeError("returned None for its completion: every one needs a reward here")
        return _number(scores[0])

    return call


def _verl_function(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], label: str
) -> ThreeArguments:
    """Return a function of response text, answer and metadata that calls `function` as verl does.

    Raises: UserError: `function` needs an argument that verl does not give.
    """
    if missing := [name for name in _required_names(parameters) if name not in _VERL]:
        raise UserError(
            f"{label} needs {', '.join(missing)} beside what verl gives ({', '.join(_VERL)}): give "
            "these defaults"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def call(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Any:
        arguments = {
            "data_source": metadata.get("data_source"),
            "solution_str": response_text,
            "ground_truth": answer,
            "extra_info": metadata.get("extra_info") or {},
        }
        result = function(**{n: v for n, v in arguments.items() if takes_all or n in parameters})
        if not isinstance(result, dict):
            return _number(result)
        if "score" not in result:
            raise TypeError(f"returned a dict without 'score': {result!r:.80}")
        score = _number(result["score"])
        return (float(result["acc"]) >= 1, score) if "acc" in result else score

    return call


def _number(score: Any) -> Any:
    """Convert a bool, which is a reward for TRL and verl, to 1.0 or 0.0."""
    return float(score) if isinstance(score, bool) else score


def _required_names(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names of the parameters that have no default and can be given by name."""
    kinds_with_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [n for n, p in parameters.items() if p.default is p.empty and p.kind in kinds_with_name]
