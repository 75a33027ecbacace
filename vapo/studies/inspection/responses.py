"""The record that every format of rollouts becomes: one response, with the file's data on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InspectedResponse:
    """One response from anybody's rollouts, in whatever format they were.

    Lists have an entry for each response token (`prompt_ids`: for each prompt token). A field is
    None if the file does not have it.
    """

    place: str  # "rollouts.jsonl, row 12", for messages
    prompt: str
    response: str
    reward: float
    group: str  # equal for the responses to one prompt in one step
    step: int | None = None
    prompt_ids: tuple[int, ...] | None = None  # as the policy read it
    response_ids: tuple[int, ...] | None = None
    tokens: tuple[str, ...] | None = None  # the text of each response token
    is_sampled: tuple[bool, ...] | None = None  # False: an environment's token; None: all are
    values: tuple[float, ...] | None = None  # of the state before each token
    logprobs: tuple[float, ...] | None = None
    advantages: tuple[float, ...] | None = None
    token_rewards: tuple[float, ...] | None = None  # None: `reward` on the last sampled token
    returns: tuple[float, ...] | None = None  # the framework's own value targets
    is_truncated: bool | None = None
    answer: str | None = None  # the reference that a verifier compares with
    table: str = ""  # the file or table of shards; empty: the file of `place`
    is_verbatim: bool = True  # False: `response` is not the text as generated, as for several turns
    not_finite: tuple[str, ...] = ()  # lists that were left out because of NaN, infinity or null


@dataclass(frozen=True)
class BadRow:
    """A row that could not be read. Other rows of its file are still read."""

    place: str
    reason: str  # one line: what is wrong with it
