"""What a server answered, checked before any of it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vapo.rollouts.engines.engine import EngineError

_NO_LOGPROB = -9999.0  # what vLLM sends for one that is not finite


@dataclass(frozen=True)
class Answer:
    """Sampled tokens, an end token included, their log-probs, and the weights that sampled them.

    `versions` are (version, number of tokens), in order; a log-prob that is not finite is NaN.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Wanted:
    """What was asked for: by it an answer is checked."""

    name: str
    max_tokens: int
    end_ids: frozenset[int]
    vocab_size: int


def read_answer(record: Any, wanted: Wanted, url: str) -> Answer:
    """The answer of `/inference/v1/generate`, held to what was asked for.

    Raises: EngineError: it is wrong; the message names the server and what is wrong.
    """
    try:
        return _read(record, wanted)
    except _WrongError as wrong:
        raise EngineError(f"the rollout server {url} gave a wrong answer: {wrong}") from None


def is_aborted(record: Any) -> bool:
    """Whether the server was told to stop while it sampled."""
    choices = record.get("choices") if isinstance(record, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and first.get("finish_reason") == "abort"


class _WrongError(Exception):
    """What is wrong with an answer."""


def _read(record: Any, wanted: Wanted) -> Answer:
    if not isinstance(record, dict):
        raise _WrongError("it is no JSON object")
    name = record.get("request_id")
    if not isinstance(name, str) or not name.endswith(wanted.name):
        raise _WrongError(f"it is for the request {str(name)[:80]!r}, not {wanted.name!r}")
    choices = record.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise _WrongError("it has not just one response")
    (choice,) = choices
    ids = _ids(choice.get("token_ids"), wanted)
    _check_end(ids, choice.get("finish_reason"), wanted)
    return Answer(ids, _logprobs(choice, ids), _versions(choice.get("weight_versions"), len(ids)))


def _ids(found: Any, wanted: Wanted) -> tuple[int, ...]:
    if not isinstance(found, list) or not found or not all(type(x) is int for x in found):
        raise _WrongError("token_ids are not one or more whole numbers")
    if len(found) > wanted.max_tokens:
        raise _WrongError(f"it has {len(found)} tokens, and at most {wanted.max_tokens} were asked")
    strange = next((x for x in found if not 0 <= x < wanted.vocab_size), None)
    if strange is not None:
        raise _WrongError(f"token {strange} is not in the vocabulary of {wanted.vocab_size}")
    return tuple(found)


def _check_end(ids: tuple[int, ...], reason: Any, wanted: Wanted) -> None:
    """A response ends with its first end token, or when its tokens are used up."""
    place = next((i for i, x in enumerate(ids) if x in wanted.end_ids), None)
    if place is not None and place + 1 < len(ids):
        raise _WrongError(f"it goes on after the end token {ids[place]}")
    if place is None and len(ids) < wanted.max_tokens:
        raise _WrongError(
            f"it ends after {len(ids)} of {wanted.max_tokens} tokens without an end token "
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
        value = math.nan if value is None else float(value)
        if value <= _NO_LOGPROB:
            value = math.nan
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
