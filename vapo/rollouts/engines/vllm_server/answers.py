"""What a server answered, checked before any of it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from vapo.rollouts.engines.engine import EngineError, Request

_NO_LOGPROB = -9999.0  # what vLLM sends for one that is not finite


class Answer(NamedTuple):
    """Sampled tokens, an end token included, their log-probs, and the weights that sampled them.

    `versions` are (version, number of tokens), in order; a log-prob that is not finite is NaN.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[str, int], ...]


def read_answer(record: Any, name: str, request: Request, vocab_size: int, url: str) -> Answer:
    """The answer of `/inference/v1/generate`, held to what was asked for.

    Raises: EngineError: it is wrong; the message names the server and what is wrong.
    """
    try:
        choice = _choice(record, name)
        ids = _ids(choice.get("token_ids"), request, vocab_size)
        _check_end(ids, choice.get("finish_reason"), request)
        versions = _versions(choice.get("weight_versions"), len(ids))
        return Answer(ids, _logprobs(choice, ids), versions)
    except _WrongError as wrong:
        raise EngineError(f"the rollout server {url} gave a wrong answer: {wrong}") from None


def is_aborted(record: Any) -> bool:
    """Whether the server was told to stop while it sampled."""
    choices = record.get("choices") if isinstance(record, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and first.get("finish_reason") == "abort"


class _WrongError(Exception):
    """What is wrong with an answer."""


def _choice(record: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(record, dict):
        raise _WrongError("it is no JSON object")
    found = record.get("request_id")
    if not isinstance(found, str) or not found.endswith(name):
        raise _WrongError(f"it is for the request {str(found)[:80]!r}, not {name!r}")
    choices = record.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise _WrongError("it has not just one response")
    return choices[0]


def _ids(found: Any, request: Request, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(found, list) or not found or not all(type(x) is int for x in found):
        raise _WrongError("token_ids are not one or more whole numbers")
    if len(found) > request.budget:
        raise _WrongError(f"it has {len(found)} tokens, and at most {request.budget} were asked")
    strange = next((x for x in found if not 0 <= x < vocab_size), None)
    if strange is not None:
        raise _WrongError(f"token {strange} is not in the vocabulary of {vocab_size}")
    return tuple(found)


def _check_end(ids: tuple[int, ...], reason: Any, request: Request) -> None:
    """A response ends with its first end token, or when its tokens are used up."""
    place = next((i for i, x in enumerate(ids) if x in request.end_ids), None)
    if place is not None and place + 1 < len(ids):
        raise _WrongError(f"it goes on after the end token {ids[place]}")
    if place is None and len(ids) < request.budget:
        raise _WrongError(
            f"it ends after {len(ids)} of {request.budget} tokens without an end token "
            f"(finish_reason {str(reason)[:80]!r})"
        )


def _logprobs(choice: Mapping[str, Any], ids: Sequence[int]) -> tuple[float, ...]:
    content = (choice.get("logprobs") or {}).get("content")
    if not isinstance(content, list) or len(content) != len(ids):
        num = len(content) if isinstance(content, list) else 0
        raise _WrongError(f"it has {num} log-probs for {len(ids)} tokens")
    found = []
    for token, entry in zip(ids, content, strict=True):
        if not isinstance(entry, dict) or entry.get("token_id") != token:
            raise _WrongError(f"a log-prob is not that of its token {token}")
        value = entry.get("logprob")  # JSON has no NaN: null
        if value is not None and type(value) not in (int, float):
            raise _WrongError(f"the log-prob of token {token} is no number")
        value = math.nan if value is None or value <= _NO_LOGPROB else float(value)
        if value > 1e-3:
            raise _WrongError(f"the log-prob of token {token} is {value:g}, above 0")
        found.append(value)
    return tuple(found)


def _versions(spans: Any, num_tokens: int) -> tuple[tuple[str, int], ...]:
    """The spans as (version, number of tokens), which follow each other over all tokens."""
    try:
        found = [(span["version"], span["start"], span["end"]) for span in spans]
        edges = [0, *(end for _, _, end in found)]
        is_whole = edges[-1] == num_tokens and all(a < b for a, b in pairwise(edges))
        is_whole = is_whole and [start for _, start, _ in found] == edges[:-1]
    except (TypeError, KeyError):
        is_whole = False
    if not is_whole or not all(isinstance(version, str) for version, _, _ in found):
        raise _WrongError("weight_versions do not say of each token which weights sampled it")
    return tuple((version, end - start) for version, start, end in found)
