"""Exact sums over a stream of responses. No response is kept, however long the stream is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import compress, repeat
from operator import add
from typing import Any, NamedTuple

import numpy as np

from vapo.studies.inspection.group_sample import (
    ResponseValues,
    is_sampled,
    response_length,
    response_values,
    returns_of,
    sampled_entries,
)
from vapo.studies.inspection.groups import Groups
from vapo.studies.inspection.responses import InspectedResponse

_TINY = 1e-12
_MAX_COUNTED_REWARDS = 100  # different rewards; any beyond them are not counted
_MICRO_BATCHES = (1, 4, 16)  # responses in a micro-batch
_UNLIKE = 0.01  # relative difference of last value target and reward that is not due to rounding
_ROUNDED_LOGPROB = 1e-3  # above 0: what rounding may do to the log-prob of a sure token


@dataclass
class Moments:
    """The number of some tokens, and their sums of R, R^2, R - V and (R - V)^2.

    R is a token's return and V its value. The explained variance of the tokens follows from them.
    """

    num: int = 0
    r: float = 0.0
    rr: float = 0.0
    d: float = 0.0
    dd: float = 0.0

    @classmethod
    def of(cls, values: np.ndarray, returns: np.ndarray) -> Moments:
        error = returns - values
        total = np.add.reduce  # which `sum` wraps, for half the time of a short response
        sums = (total(returns), returns @ returns, total(error), error @ error)
        return cls(len(values), *map(float, sums))

    def add(self, other: Moments) -> None:
        self.num += other.num
        self.r += other.r
        self.rr += other.rr
        self.d += other.d
        self.dd += other.dd

    @property
    def value(self) -> float:
        """The explained variance 1 - Var(R - V) / Var(R) of all these tokens together.

        It is NaN if there is no token, or if all returns are equal.
        """
        if not self.num:
            return math.nan
        r, rr, d, dd = (x / self.num for x in (self.r, self.rr, self.d, self.dd))
        variance = rr - r * r
        return math.nan if variance <= _TINY * max(rr, _TINY) else 1 - (dd - d * d) / variance


@dataclass
class MicroBatches:
    """The mean explained variance of micro-batches of `num_rows` responses, in the file's order.

    A framework that computes explained variance in each micro-batch logs this mean. It is not the
    explained variance of the batch, because returns differ less within few responses than over all.
    """

    num_rows: int
    num: int = 0
    num_undefined: int = 0
    total: float = 0.0
    _rows: int = 0
    _open: Moments = field(default_factory=Moments)

    def add(self, moments: Moments) -> None:
        self._open.add(moments)
        self._rows += 1
        if self._rows == self.num_rows:
            value = self._open.value
            is_defined = not math.isnan(value)
            self.num_undefined += not is_defined
            self.num += is_defined
            self.total += value if is_defined else 0.0
            self._rows, self._open = 0, Moments()

    def extend(self, other: MicroBatches) -> None:
        """Add the micro-batches of another stream, without an unfinished one at its end."""
        self.num += other.num
        self.num_undefined += other.num_undefined
        self.total += other.total

    @property
    def mean(self) -> float:
        return self.total / self.num if self.num else math.nan


@dataclass(frozen=True)
class TokenColumns:
    """The numbers of one response's sampled tokens that the sums need, computed once.

    Attributes:
        length: the number of sampled tokens; None if no column counts them.
        response_values: the values, all finite; None if the response has none.
        moments: the moments of values and returns; None if the response has no values.
        target_moments: the moments of values and the file's own value targets; None if it has none.
        num_logprobs, logprob: the number and the sum of the log-probs that are not above 0.
        num_impossible_logprobs: the number of log-probs above 0, by more than rounding.
        ends_otherwise: whether the last value target differs from the response's reward. With every
            lambda it is the last token's reward, so the file lacks the rewards of single tokens.
        has_turns: whether there are several turns and no value targets, so that the rewards of
            single turns may be missing.
    """

    length: int | None
    response_values: ResponseValues | None = None
    moments: Moments | None = None
    target_moments: Moments | None = None
    num_logprobs: int = 0
    logprob: float = 0.0
    num_impossible_logprobs: int = 0
    ends_otherwise: bool = False
    has_turns: bool = False

    @classmethod
    def of(cls, response: InspectedResponse, *, gamma: float) -> TokenColumns:
        columns: dict[str, Any] = {"length": response_length(response)}
        if response.logprobs is not None:
            logprobs = list(compress(response.logprobs, response.is_sampled or repeat(True)))
            possible = [x for x in logprobs if x <= _ROUNDED_LOGPROB]
            columns["num_logprobs"], columns["logprob"] = len(possible), sum(possible)
            columns["num_impossible_logprobs"] = len(logprobs) - len(possible)
        if (own_values := response_values(response)) is not None:
            columns["response_values"], values = own_values, own_values.values.astype(float)
            returns = returns_of(own_values, gamma)
            columns["moments"] = Moments.of(values, returns)
            if response.returns is not None:
                targets = sampled_entries(response, response.returns)
                columns["target_moments"] = Moments.of(values, targets)
                if response.token_rewards is None and not response.is_truncated and len(targets):
                    apart = abs(targets[-1] - response.reward)
                    columns["ends_otherwise"] = bool(
                        apart > _UNLIKE * max(1.0, abs(response.reward))
                    )
            elif response.token_rewards is None and response.is_sampled is not None:
                begins = np.diff(is_sampled(response, len(response.values or ())), prepend=False)
                columns["has_turns"] = int(begins.sum()) > 2  # begin, end, and begin again
        return cls(**columns)


class NotFinite(NamedTuple):
    """The rows whose list of some name is left out because it has NaN, infinity or null.

    Attributes:
        first: the file and number of the first such row.
    """

    num_rows: int
    first: str


_MERGE_RULES = {"low": min, "high": max, "longest": max}  # other numbers are added


@dataclass
class RunningSums:
    """Counts and sums over a stream of responses, or over one part of it.

    Attributes:
        num: the number of responses.
        reward, reward_squares, low, high: sum, sum of squares, lowest and highest reward.
        rewards: reward -> how many responses have it; only the first 101 different rewards.
        tokens, longest: sum and maximum of lengths in sampled tokens, over the `num_with_length`
            responses whose length is known.
        num_truncated, truncated_reward: the number of truncated responses and the sum of their
            rewards, among the `num_known_ends` responses of which it is known.
        num_with_values, num_ending_otherwise, num_with_turns: counts of responses (`TokenColumns`).
        num_logprobs, logprob, num_impossible_logprobs: sums over tokens (`TokenColumns`).
        explained: moments of returns and values over all tokens.
        explained_of_targets: moments of the file's own value targets and values.
        not_finite: the name of a list -> the rows in which it is not finite.
        micro_batches: explained variance in micro-batches of several sizes.
        groups: sums of rewards of each group.
    """

    num: int = 0
    reward: float = 0.0
    reward_squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    rewards: dict[float, int] = field(default_factory=dict)
    num_with_length: int = 0
    tokens: int = 0
    longest: int = 0
    num_known_ends: int = 0
    num_truncated: int = 0
    truncated_reward: float = 0.0
    num_with_values: int = 0
    num_ending_otherwise: int = 0
    num_with_turns: int = 0
    num_logprobs: int = 0
    logprob: float = 0.0
    num_impossible_logprobs: int = 0
    explained: Moments = field(default_factory=Moments)
    explained_of_targets: Moments = field(default_factory=Moments)
    not_finite: dict[str, NotFinite] = field(default_factory=dict)
    micro_batches: Sequence[MicroBatches] = ()
    groups: Groups = field(default_factory=Groups)

    @classmethod
    def merged(cls, parts: Iterable[RunningSums]) -> RunningSums:
        """Return the sums over all parts, without micro-batches. No group may be in two parts."""
        total = cls()
        for part in parts:
            for field_info in fields(cls):
                if isinstance(number := getattr(part, field_info.name), (int, float)):
                    merge = _MERGE_RULES.get(field_info.name, add)
                    previous = getattr(total, field_info.name)
                    setattr(total, field_info.name, merge(previous, number))
            for reward, num in part.rewards.items():
                total._count_reward(reward, num)
            for name, not_finite in part.not_finite.items():
                total._count_not_finite(name, not_finite)
            total.explained.add(part.explained)
            total.explained_of_targets.add(part.explained_of_targets)
            total.groups.extend(part.groups)
        return total

    def _count_reward(self, reward: float, num: int) -> None:
        if reward in self.rewards or len(self.rewards) <= _MAX_COUNTED_REWARDS:
            self.rewards[reward] = self.rewards.get(reward, 0) + num

    def _count_not_finite(self, name: str, new: NotFinite) -> None:
        previous = self.not_finite.get(name, NotFinite(0, new.first))
        self.not_finite[name] = NotFinite(previous.num_rows + new.num_rows, previous.first)

    def add(self, response: InspectedResponse, columns: TokenColumns) -> None:
        """Add a response, and its `columns`, which were made from it."""
        reward = response.reward
        self.num += 1
        self.reward += reward
        self.reward_squares += reward * reward
        self.low, self.high = min(self.low, reward), max(self.high, reward)
        self._count_reward(reward, 1)
        self.groups.add(response.group, reward)
        for name in response.not_finite:
            self._count_not_finite(name, NotFinite(1, response.place))
        if columns.length is not None:
            self.num_with_length += 1
            self.tokens += columns.length
            self.longest = max(self.longest, columns.length)
        if response.is_truncated is not None:
            self.num_known_ends += 1
            self.num_truncated += response.is_truncated
            self.truncated_reward += reward * response.is_truncated
        self.num_logprobs += columns.num_logprobs
        self.logprob += columns.logprob
        self.num_impossible_logprobs += columns.num_impossible_logprobs
        if columns.moments is None:
            return
        self.num_with_values += 1
        self.num_ending_otherwise += columns.ends_otherwise
        self.num_with_turns += columns.has_turns
        self.explained.add(columns.moments)
        if columns.target_moments is not None:
            self.explained_of_targets.add(columns.target_moments)

    @property
    def reward_mean(self) -> float:
        return self.reward / self.num if self.num else math.nan

    @property
    def reward_std(self) -> float:
        variance = self.reward_squares / max(self.num, 1) - self.reward_mean**2
        return math.sqrt(max(variance, 0.0)) if self.num else math.nan

    @property
    def length_mean(self) -> float:
        return self.tokens / self.num_with_length if self.num_with_length else math.nan

    @property
    def truncated_share(self) -> float:
        return self.num_truncated / self.num_known_ends if self.num_known_ends else math.nan


Part = tuple[str, int | None]  # the name of a table of rollouts, and a training step


@dataclass
class RunningParts:
    """The sums of each part of a stream: of each step of each table. `total` adds them up."""

    parts: dict[Part, RunningSums] = field(default_factory=dict)
    _micro_batches: dict[str, list[MicroBatches]] = field(default_factory=dict)  # by table

    def add(self, part: Part, response: InspectedResponse, columns: TokenColumns) -> None:
        if part not in self.parts:
            self.parts[part] = RunningSums()
            self._micro_batches.setdefault(part[0], _micro_batches())
        self.parts[part].add(response, columns)
        if columns.moments is not None:
            for micro_batches in self._micro_batches[part[0]]:
                micro_batches.add(columns.moments)

    def total(self, table: str | None = None) -> RunningSums:
        """Return the sums over one table, or over all of them if `table` is None.

        Micro-batches are cut within each table.
        """
        tables = self._micro_batches if table is None else (table,)
        sums = RunningSums.merged(x for part, x in self.parts.items() if part[0] in tables)
        sums.micro_batches = _micro_batches()
        for name in tables:
            table_batches = self._micro_batches[name]
            for total, addend in zip(sums.micro_batches, table_batches, strict=True):
                total.extend(addend)
        return sums


def _micro_batches() -> list[MicroBatches]:
    return [MicroBatches(num) for num in _MICRO_BATCHES]
