"""A sample of whole groups from a stream of responses, in whatever order they come."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from vapo.studies.inspection.responses import InspectedResponse

GroupKey = tuple[str, str]  # the part of the stream (a step, a file), and the group's name in it


T = TypeVar("T")


class Valued(NamedTuple):
    """What figures need of a response: its reward, and of its sampled tokens the values in float32
    and the rewards along the way, where the file has them."""

    values: np.ndarray
    reward: float
    token_rewards: np.ndarray | None = None


@dataclass
class GroupSample(Generic[T]):
    """All that was kept of some groups, drawn at random, of at most about `max_tokens` tokens.

    Each group has a random number, by its name and `seed`, and those with the smallest are kept:
    a group that was given up once is never met again, so that no kept group lacks a response. All
    groups are kept where they have no more tokens. One group is always kept.
    """

    max_tokens: int
    seed: int = 0
    num_tokens: int = 0
    _kept: dict[GroupKey, list[T]] = field(default_factory=dict)
    _costs: dict[GroupKey, int] = field(default_factory=dict)
    _heap: list[tuple[int, GroupKey]] = field(default_factory=list)  # the largest number first
    _limit: int | None = None  # groups at or above it were given up

    @property
    def is_whole(self) -> bool:
        """Whether nothing was given up."""
        return self._limit is None

    def first(self, key: GroupKey) -> T | None:
        """What was added first of a group that is kept."""
        return self._kept[key][0] if key in self._kept else None

    def add(self, key: GroupKey, one: T, num_tokens: int) -> None:
        if key not in self._kept:
            number = self._number(key)
            if self._limit is not None and number >= self._limit:
                return
            self._kept[key], self._costs[key] = [], 0
            heapq.heappush(self._heap, (-number, key))
        self._kept[key].append(one)
        self._costs[key] += num_tokens
        self.num_tokens += num_tokens
        while self.num_tokens > self.max_tokens and len(self._kept) > 1:
            negative, given_up = heapq.heappop(self._heap)
            self._limit = -negative
            del self._kept[given_up]
            self.num_tokens -= self._costs.pop(given_up)

    def groups(self) -> dict[GroupKey, list[T]]:
        """The kept groups, in the order in which they were met."""
        return dict(self._kept)

    def _number(self, key: GroupKey) -> int:
        digest = blake2b(repr((self.seed, *key)).encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "big")


def num_tokens(response: InspectedResponse) -> int:
    """What a response costs to keep: its tokens, or about as many where nothing counts them."""
    column = _counted(response)
    return max(1, len(response.response) // 4 if column is None else len(column))


def _num_prompt_tokens(response: InspectedResponse) -> int:
    """What a prompt costs to keep: its tokens, or about as many where nothing counts them."""
    ids = response.prompt_ids
    return len(response.prompt) // 4 if ids is None else len(ids)


def share_prompt(
    one: InspectedResponse, other: InspectedResponse | None
) -> tuple[InspectedResponse, int]:
    """The response, with the other's prompt in the place of its own where they are equal, and what
    it costs to keep."""
    if other is None or (one.prompt, one.prompt_ids) != (other.prompt, other.prompt_ids):
        return one, num_tokens(one) + _num_prompt_tokens(one)
    return replace(one, prompt=other.prompt, prompt_ids=other.prompt_ids), num_tokens(one)


def _counted(response: InspectedResponse) -> Sequence[object] | None:
    """A column with one entry for each token; None: there is none."""
    columns = (response.response_ids, response.values, response.logprobs, response.tokens)
    return next((column for column in columns if column is not None), None)


@dataclass(frozen=True)
class Tokens:
    """The sampled tokens of responses that have a finite value, one after the other.

    Of each token: `values`, `returns`, how many sampled tokens come before it (`position`), its
    response (`row`) and that one's group. Of each response: `rewards`, `lengths` in sampled tokens
    and `row_groups`. Groups are numbered from 0.
    """

    values: np.ndarray
    returns: np.ndarray
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
        """Sums of a column of the tokens, one for each group."""
        return np.bincount(self.group, weights=x, minlength=self.num_groups)


def is_sampled(response: InspectedResponse, length: int) -> np.ndarray:
    """Of each of the response's tokens, whether the policy sampled it."""
    if response.is_sampled is None:
        return np.ones(length, dtype=bool)
    return np.asarray(response.is_sampled[:length], dtype=bool)


def sampled_places(response: InspectedResponse, length: int) -> np.ndarray:
    """Which of the response's tokens the policy sampled."""
    return np.flatnonzero(is_sampled(response, length))


def sampled_entries(
    response: InspectedResponse, column: Sequence[float], dtype: type[np.floating[Any]] = np.float64
) -> np.ndarray:
    """The entries of a column that are of sampled tokens."""
    entries = np.asarray(column, dtype=dtype)
    return entries if response.is_sampled is None else entries[np.asarray(response.is_sampled)]


def response_length(response: InspectedResponse) -> int | None:
    """Its sampled tokens; None where no column counts them."""
    column = _counted(response)
    if column is None or response.is_sampled is None:
        return None if column is None else len(column)
    return sum(response.is_sampled)


def valued(response: InspectedResponse) -> Valued | None:
    """None without values."""
    if response.values is None:
        return None
    values = sampled_entries(response, response.values, np.float32)
    return Valued(values, response.reward, earned(response))


def earned(response: InspectedResponse) -> np.ndarray | None:
    """Of each sampled token its reward along the way, and what stands on the environment's tokens
    behind it; None where the file has none."""
    if response.token_rewards is None:
        return None
    is_own = is_sampled(response, len(response.token_rewards))
    earner = np.cumsum(is_own) - 1
    rewards = np.asarray(response.token_rewards, dtype=float)[earner >= 0]
    return np.bincount(earner[earner >= 0], weights=rewards, minlength=int(is_own.sum()))


def returns_of(own: Valued, gamma: float) -> np.ndarray:
    """The Monte-Carlo return at each sampled token, which is R_t = r_t + gamma * R_(t + 1).

    Without rewards along the way the reward stands on the last token.
    """
    if own.token_rewards is None:
        return own.reward * gamma ** np.arange(len(own.values) - 1, -1, -1.0)
    backwards = own.token_rewards[::-1].tolist()
    return np.array(list(accumulate(backwards, lambda later, r: r + gamma * later)))[::-1]


def tokens_of(groups: Mapping[GroupKey, Sequence[Valued]], *, gamma: float) -> Tokens:
    """The groups' tokens as arrays."""
    columns: dict[str, list[np.ndarray]] = {"values": [], "returns": [], "position": [], "row": []}
    rewards, lengths, row_groups = list[float](), list[int](), list[int]()
    for number, group in enumerate(groups.values()):
        for one in group:
            length = len(one.values)
            columns["values"].append(one.values.astype(float))
            columns["returns"].append(returns_of(one, gamma))
            columns["position"].append(np.arange(length))
            columns["row"].append(np.full(length, len(rewards)))
            rewards.append(one.reward)
            lengths.append(length)
            row_groups.append(number)
    together = {name: np.concatenate(x) if x else np.zeros(0) for name, x in columns.items()}
    return Tokens(
        values=together["values"],
        returns=together["returns"],
        position=together["position"].astype(int),
        row=together["row"].astype(int),
        rewards=np.array(rewards, dtype=float),
        lengths=np.array(lengths, dtype=int),
        row_groups=np.array(row_groups, dtype=int),
        num_groups=len(groups),
    )
