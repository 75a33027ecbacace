"""Sums over a stream of responses, of which nothing is kept: exact, however many rows there are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import compress, repeat
from operator import add
from typing import Any, NamedTuple

import numpy as np

from vapo.studies.inspection.group_sample import (
    Valued,
    is_sampled,
    response_length,
    returns_of,
    sampled_entries,
    valued,
)
from vapo.studies.inspection.groups import Groups
from vapo.studies.inspection.responses import InspectedResponse

_TINY = 1e-12
_MOST_REWARDS = 100  # different ones that are counted
_MICRO_BATCHES = (1, 4, 16)  # rows
_UNLIKE = 0.01  # of the last value target and the reward: more than rounding
_ROUNDED_LOGPROB = 1e-3  # above 0: what rounding may do to the log-prob of a sure token


@dataclass
class Moments:
    """Of some tokens: their number, and sums of R, R^2, R - V and (R - V)^2."""

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
        """The explained variance, 1 - Var(R - V) / Var(R) of all in one piece.

        NaN where there are no tokens, or all returns are equal.
        """
        if not self.num:
            return math.nan
        r, rr, d, dd = (x / self.num for x in (self.r, self.rr, self.d, self.dd))
        variance = rr - r * r
        return math.nan if variance <= _TINY * max(rr, _TINY) else 1 - (dd - d * d) / variance


@dataclass
class MicroBatches:
    """The mean of explained variances over micro-batches of `num_rows` rows, as they come.

    That is what a framework logs which computes the figure in each micro-batch: not the explained
    variance of the batch, as returns differ less within few rows than over all.
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
        """Take in another stream's, but for the last rows, which fill no micro-batch."""
        self.num += other.num
        self.num_undefined += other.num_undefined
        self.total += other.total

    @property
    def mean(self) -> float:
        return self.total / self.num if self.num else math.nan


@dataclass(frozen=True)
class TokenColumns:
    """What the sums need of one response's sampled tokens, computed once.

    `length` is None where no column counts them. `valued`, `moments` and those of the framework's
    own value targets are None without values. All lists are finite.

    Rewards along the way that the file lacks show where the last value target, which is the last
    reward whatever lambda is, is not the response's reward (`ends_otherwise`), and may be anywhere
    in turns without value targets (`has_turns`).
    """

    length: int | None
    valued: Valued | None = None
    moments: Moments | None = None
    target_moments: Moments | None = None
    num_logprobs: int = 0
    logprob: float = 0.0
    num_impossible_logprobs: int = 0
    ends_otherwise: bool = False
    has_turns: bool = False

    @classmethod
    def of(cls, response: InspectedResponse, *, gamma: float) -> TokenColumns:
        found: dict[str, Any] = {"length": response_length(response)}
        if response.logprobs is not None:
            logprobs = list(compress(response.logprobs, response.is_sampled or repeat(True)))
            possible = [x for x in logprobs if x <= _ROUNDED_LOGPROB]
            found["num_logprobs"], found["logprob"] = len(possible), sum(possible)
            found["num_impossible_logprobs"] = len(logprobs) - len(possible)
        if (own := valued(response)) is not None:
            found["valued"], values = own, own.values.astype(float)
            returns = returns_of(own, gamma)
            found["moments"] = Moments.of(values, returns)
            if response.returns is not None:
                targets = sampled_entries(response, response.returns)
                found["target_moments"] = Moments.of(values, targets)
                if response.token_rewards is None and not response.is_truncated and len(targets):
                    apart = abs(targets[-1] - response.reward)
                    found["ends_otherwise"] = bool(apart > _UNLIKE * max(1.0, abs(response.reward)))
            elif response.token_rewards is None and response.is_sampled is not None:
                begins = np.diff(is_sampled(response, len(response.values or ())), prepend=False)
                found["has_turns"] = int(begins.sum()) > 2  # begin, end, and begin again
        return cls(**found)


class NotFinite(NamedTuple):
    """Rows whose list of one name has NaN, infinity or null and is left out; where the first is."""

    num_rows: int
    first: str


_JOINED = {"low": min, "high": max, "longest": max}  # the others are added up


@dataclass
class RunningSums:
    """Everything that is exact over a stream: of all of it, or of one part.

    `lengths` counts sampled tokens where a column of the response counts them, else nothing.
    """

    num: int = 0
    reward: float = 0.0
    reward_squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    rewards: dict[float, int] = field(default_factory=dict)  # while there are few different ones
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
    not_finite: dict[str, NotFinite] = field(default_factory=dict)  # by the list's name
    micro_batches: Sequence[MicroBatches] = ()
    groups: Groups = field(default_factory=Groups)

    @classmethod
    def together(cls, parts: Iterable[RunningSums]) -> RunningSums:
        """Of all parts, which have no group in common; without micro-batches."""
        whole = cls()
        for part in parts:
            for one in fields(cls):
                if isinstance(own := getattr(part, one.name), (int, float)):
                    join, before = _JOINED.get(one.name, add), getattr(whole, one.name)
                    setattr(whole, one.name, join(before, own))
            for reward, num in part.rewards.items():
                whole._count(reward, num)
            for name, found in part.not_finite.items():
                whole._leave_out(name, found)
            whole.explained.add(part.explained)
            whole.explained_of_targets.add(part.explained_of_targets)
            whole.groups.extend(part.groups)
        return whole

    def _count(self, reward: float, num: int) -> None:
        if reward in self.rewards or len(self.rewards) <= _MOST_REWARDS:
            self.rewards[reward] = self.rewards.get(reward, 0) + num

    def _leave_out(self, name: str, found: NotFinite) -> None:
        before = self.not_finite.get(name, NotFinite(0, found.first))
        self.not_finite[name] = NotFinite(before.num_rows + found.num_rows, before.first)

    def add(self, response: InspectedResponse, columns: TokenColumns) -> None:
        """Add a response, of which `columns` are."""
        reward = response.reward
        self.num += 1
        self.reward += reward
        self.reward_squares += reward * reward
        self.low, self.high = min(self.low, reward), max(self.high, reward)
        self._count(reward, 1)
        self.groups.add(response.group, reward)
        for name in response.not_finite:
            self._leave_out(name, NotFinite(1, response.place))
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


Part = tuple[str, int | None]  # a table of rollouts, and a step


@dataclass
class RunningParts:
    """The sums of each part of a stream, of which those of all of it are made."""

    parts: dict[Part, RunningSums] = field(default_factory=dict)
    _micro_batches: dict[str, list[MicroBatches]] = field(default_factory=dict)  # by table

    def add(self, part: Part, response: InspectedResponse, columns: TokenColumns) -> None:
        if part not in self.parts:
            self.parts[part] = RunningSums()
            self._micro_batches.setdefault(part[0], _micro_batches())
        self.parts[part].add(response, columns)
        if columns.moments is not None:
            for one in self._micro_batches[part[0]]:
                one.add(columns.moments)

    def whole(self, table: str | None = None) -> RunningSums:
        """Of all, or of one table. Micro-batches do not go over tables."""
        tables = self._micro_batches if table is None else (table,)
        found = RunningSums.together(x for part, x in self.parts.items() if part[0] in tables)
        found.micro_batches = _micro_batches()
        for name in tables:
            for own, one in zip(found.micro_batches, self._micro_batches[name], strict=True):
                own.extend(one)
        return found


def _micro_batches() -> list[MicroBatches]:
    return [MicroBatches(num) for num in _MICRO_BATCHES]
