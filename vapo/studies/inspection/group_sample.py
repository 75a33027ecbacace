"""Draw a random sample of whole groups from a stream of responses, which may come in any order.

A group is the responses to one prompt of one step.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from vapo.studies.inspection.responses import InspectedResponse

GroupKey = tuple[str, str]  # the name of a part (a step, a file), and of the group in that part

T = TypeVar("T")


class ResponseValues(NamedTuple):
    """A response's reward, with the values, rewards and log-probs of its sampled tokens.

    `values` and `logprobs` are in float32. `token_rewards` is None if the file has no rewards for
    single tokens, and `logprobs` is None if it has no log-probs.
    """

    values: np.ndarray
    reward: float
    token_rewards: np.ndarray | None = None
    logprobs: np.ndarray | None = None


@dataclass
class GroupSample(Generic[T]):
    """A random sample of groups that holds at most `max_tokens` tokens, or else a single group.

    Each group has a random number, made from its name and `seed`. When there are too many tokens,
    the group with the largest number is dropped, and the sample takes no further group with that
    number or a larger one. So a dropped group never comes back, and no group of the sample lacks a
    response. If all groups together fit into `max_tokens`, the sample has all of them.
    """

    max_tokens: int
    seed: int = 0
    num_tokens: int = 0
    _groups: dict[GroupKey, list[T]] = field(default_factory=dict)
    _costs: dict[GroupKey, int] = field(default_factory=dict)
    _heap: list[tuple[int, GroupKey]] = field(default_factory=list)  # the largest number first
    _limit: int | None = None  # groups with this number or a larger one were dropped

    @property
    def is_whole(self) -> bool:
        """Whether no group was dropped."""
        return self._limit is None

    def first(self, key: GroupKey) -> T | None:
        """Return the first item of a group; None if the group is not in the sample."""
        return self._groups[key][0] if key in self._groups else None

    def add(self, key: GroupKey, item: T, num_tokens: int) -> None:
        """Add an item that takes `num_tokens` of the budget, unless its group was dropped before.

        Then drop groups until the sample fits into its budget again.
        """
        if key not in self._groups:
            number = self._number(key)
            if self._limit is not None and number >= self._limit:
                return
            self._groups[key], self._costs[key] = [], 0
            heapq.heappush(self._heap, (-number, key))
        self._groups[key].append(item)
        self._costs[key] += num_tokens
        self.num_tokens += num_tokens
        while self.num_tokens > self.max_tokens and len(self._groups) > 1:
            negative, dropped = heapq.heappop(self._heap)
            self._limit = -negative
            del self._groups[dropped]
            self.num_tokens -= self._costs.pop(dropped)

    def groups(self) -> dict[GroupKey, list[T]]:
        """Return the groups of the sample, in the order in which they came."""
        return dict(self._groups)

    def _number(self, key: GroupKey) -> int:
        digest = blake2b(repr((self.seed, *key)).encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "big")


def num_tokens(response: InspectedResponse) -> int:
    """Return the number of a response's tokens. If no column counts them, estimate it from the
    text.
    """
    column = _token_column(response)
    return max(1, len(response.response) // 4 if column is None else len(column))


def _num_prompt_tokens(response: InspectedResponse) -> int:
    """Return the number of a prompt's tokens, estimated from its text if the file has no ids."""
    ids = response.prompt_ids
    return len(response.prompt) // 4 if ids is None else len(ids)


def share_prompt(
    response: InspectedResponse, sibling: InspectedResponse | None
) -> tuple[InspectedResponse, int]:
    """Return the response and the number of tokens that it adds to memory.

    Args:
        sibling: another response of its group. If both prompts are equal, the returned response
            shares the sibling's prompt object, which then adds nothing to memory.
    """
    prompt = (response.prompt, response.prompt_ids)
    if sibling is None or prompt != (sibling.prompt, sibling.prompt_ids):
        return response, num_tokens(response) + _num_prompt_tokens(response)
    shared = replace(response, prompt=sibling.prompt, prompt_ids=sibling.prompt_ids)
    return shared, num_tokens(response)


def _token_column(response: InspectedResponse) -> Sequence[object] | None:
    """Return a column with one entry for each token, or None if the response has no such column."""
    columns = (response.response_ids, response.values, response.logprobs, response.tokens)
    return next((column for column in columns if column is not None), None)


@dataclass(frozen=True)
class Tokens:
    """The sampled tokens of all responses that have values, one after the other.

    Attributes:
        values, returns: of each token.
        logprobs: of each token; NaN where the file has none.
        position: for each token, how many sampled tokens of its response come before it.
        row: for each token, its response's number, an index into `rewards`, `lengths` and
            `row_groups`.
        rewards: of each response.
        lengths: the number of sampled tokens of each response.
        row_groups: the number of each response's group, counted from 0.
    """

    values: np.ndarray
    returns: np.ndarray
    logprobs: np.ndarray
    position: np.ndarray
    row: np.ndarray
    rewards: np.ndarray
    lengths: np.ndarray
    row_groups: np.ndarray
    num_groups: int

    @property
    def group(self) -> np.ndarray:
        return self.row_groups[self.row]

    def by_group(self, x: np.ndarray) -> np.ndarray:
        """Sum a column with an entry for each token over the tokens of each group: [num_groups]."""
        return np.bincount(self.group, weights=x, minlength=self.num_groups)


def is_sampled(response: InspectedResponse, length: int) -> np.ndarray:
    """Return whether the policy sampled each of the response's first `length` tokens."""
    if response.is_sampled is None:
        return np.ones(length, dtype=bool)
    return np.asarray(response.is_sampled[:length], dtype=bool)


def sampled_places(response: InspectedResponse, length: int) -> np.ndarray:
    """Return the indices of the sampled tokens among the response's first `length` tokens."""
    return np.flatnonzero(is_sampled(response, length))


def sampled_entries(
    response: InspectedResponse, column: Sequence[float], dtype: type[np.floating[Any]] = np.float64
) -> np.ndarray:
    """Return the entries of a per-token column that belong to sampled tokens."""
    entries = np.asarray(column, dtype=dtype)
    return entries if response.is_sampled is None else entries[np.asarray(response.is_sampled)]


def response_length(response: InspectedResponse) -> int | None:
    """Return the number of sampled tokens, or None if no column counts the tokens."""
    column = _token_column(response)
    if column is None or response.is_sampled is None:
        return None if column is None else len(column)
    return sum(response.is_sampled)


def response_values(response: InspectedResponse) -> ResponseValues | None:
    """Return the numbers of a response's sampled tokens, or None if it has no values."""
    if response.values is None:
        return None
    values = sampled_entries(response, response.values, np.float32)
    logprobs = None
    if response.logprobs is not None:
        logprobs = sampled_entries(response, response.logprobs, np.float32)
    return ResponseValues(values, response.reward, sampled_rewards(response), logprobs)


def sampled_rewards(response: InspectedResponse) -> np.ndarray | None:
    """Return the reward of each sampled token; None if the file has no rewards for single tokens.

    A reward on an environment's token counts for the last sampled token before it. Rewards before
    the first sampled token are dropped.
    """
    if response.token_rewards is None:
        return None
    flags = is_sampled(response, len(response.token_rewards))
    earner = np.cumsum(flags) - 1
    rewards = np.asarray(response.token_rewards, dtype=float)[earner >= 0]
    return np.bincount(earner[earner >= 0], weights=rewards, minlength=int(flags.sum()))


def returns_of(response: ResponseValues, gamma: float) -> np.ndarray:
    """Return the Monte-Carlo return R_t = r_t + gamma * R_(t + 1) at each sampled token.

    If there are no rewards for single tokens, the last token gets the response's reward.
    """
    if response.token_rewards is None:
        return response.reward * gamma ** np.arange(len(response.values) - 1, -1, -1.0)
    backwards = response.token_rewards[::-1].tolist()
    return np.array(list(accumulate(backwards, lambda later, r: r + gamma * later)))[::-1]


def tokens_of(groups: Mapping[GroupKey, Sequence[ResponseValues]], *, gamma: float) -> Tokens:
    """Join the tokens of all groups into one `Tokens`, with returns discounted by gamma."""
    names = ("values", "returns", "logprobs", "position", "row")
    columns: dict[str, list[np.ndarray]] = {name: [] for name in names}
    rewards, lengths, row_groups = list[float](), list[int](), list[int]()
    for number, group in enumerate(groups.values()):
        for response in group:
            length = len(response.values)
            columns["values"].append(response.values.astype(float))
            columns["returns"].append(returns_of(response, gamma))
            logprobs = response.logprobs
            columns["logprobs"].append(np.full(length, np.nan) if logprobs is None else logprobs)
            columns["position"].append(np.arange(length))
            columns["row"].append(np.full(length, len(rewards)))
            rewards.append(response.reward)
            lengths.append(length)
            row_groups.append(number)
    arrays = {name: np.concatenate(x) if x else np.zeros(0) for name, x in columns.items()}
    return Tokens(
        values=arrays["values"],
        returns=arrays["returns"],
        logprobs=arrays["logprobs"].astype(float),
        position=arrays["position"].astype(int),
        row=arrays["row"].astype(int),
        rewards=np.array(rewards, dtype=float),
        lengths=np.array(lengths, dtype=int),
        row_groups=np.array(row_groups, dtype=int),
        num_groups=len(groups),
    )
