"""Sums over a stream of responses, of which nothing is kept: exact, however many rows there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vapo.studies.inspection.group_sample import (
    Valued,
    is_sampled,
    response_length,
    returns_of,
    sampled_places,
    valued,
)
from vapo.studies.inspection.groups import Groups
from vapo.studies.inspection.responses import InspectedResponse

_TINY = 1e-12
_MOST_REWARDS = 100  # different ones that are counted
_UNLIKE = 0.01  # of the last value target and the reward: more than rounding
_ROUNDED_LOGPROB = 1e-3  # above 0: what rounding may do to the log-prob of a sure token


class Moments(NamedTuple):
    """Of some tokens: their number, and sums of R, R^2, R - V and (R - V)^2."""

    num: int
    r: float
    rr: float
    d: float
    dd: float

    @classmethod
    def of(cls, values: np.ndarray, returns: np.ndarray) -> Moments:
        error = returns - values
        sums = (returns.sum(), returns @ returns, error.sum(), error @ error)
        return cls(len(values), *map(float, sums))


@dataclass
class ExplainedVariance:
    """1 - Var(R - V) / Var(R) of all that was added, in one piece."""

    num: int = 0
    r: float = 0.0
    rr: float = 0.0
    d: float = 0.0
    dd: float = 0.0

    def add(self, moments: Moments) -> None:
        self.num += moments.num
        self.r += moments.r
        self.rr += moments.rr
        self.d += moments.d
        self.dd += moments.dd

    @property
    def value(self) -> float:
        """NaN where nothing was added, or all returns are equal."""
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
    _open: ExplainedVariance = field(default_factory=ExplainedVariance)

    def add(self, moments: Moments) -> None:
        self._open.add(moments)
        self._rows += 1
        if self._rows == self.num_rows:
            value = self._open.value
            if math.isnan(value):
                self.num_undefined += 1
            else:
                self.num += 1
                self.total += value
            self._rows, self._open = 0, ExplainedVariance()

    @property
    def mean(self) -> float:
        return self.total / self.num if self.num else math.nan


@dataclass(frozen=True)
class TokenColumns:
    """What the sums need of one response's sampled tokens, computed once.

    `length` is None where no column counts them. `moments` and those of the framework's own value
    targets are of the tokens with a finite value, `valued` of all; None without values.

    Rewards along the way that the file lacks show where the last value target, which is the last
    reward whatever lambda is, is not the response's reward (`ends_otherwise`), and may be anywhere
    in turns without value targets (`has_turns`).
    """

    length: int | None
    valued: Valued | None = None
    moments: Moments | None = None
    target_moments: Moments | None = None
    num_bad_values: int = 0
    num_logprobs: int = 0
    logprob: float = 0.0
    num_impossible_logprobs: int = 0
    ends_otherwise: bool = False
    has_turns: bool = False

    @classmethod
    def of(cls, response: InspectedResponse, *, gamma: float) -> TokenColumns:
        found: dict[str, Any] = {"length": response_length(response)}
        if response.logprobs is not None:
            places = sampled_places(response, len(response.logprobs))
            logprobs = np.asarray(response.logprobs, dtype=float)[places]
            is_possible = np.isfinite(logprobs) & (logprobs <= _ROUNDED_LOGPROB)
            found["num_impossible_logprobs"] = int((~is_possible).sum())
            found["num_logprobs"] = int(is_possible.sum())
            found["logprob"] = float(logprobs[is_possible].sum())
        if (own := valued(response)) is not None:
            found["valued"], values = own, own.values.astype(float)
            known = np.isfinite(values)
            returns = returns_of(own, gamma)
            found["moments"] = Moments.of(values[known], returns[known])
            found["num_bad_values"] = int((~known).sum())
            if response.returns is not None:
                targets = np.asarray(response.returns, dtype=float)
                targets = targets[sampled_places(response, len(targets))]
                both = known & np.isfinite(targets)
                found["target_moments"] = Moments.of(values[both], targets[both])
                if response.token_rewards is None and not response.is_truncated and len(targets):
                    apart = abs(targets[-1] - response.reward)
                    found["ends_otherwise"] = bool(apart > _UNLIKE * max(1.0, abs(response.reward)))
            elif response.token_rewards is None and response.is_sampled is not None:
                begins = np.diff(is_sampled(response, len(response.values or ())), prepend=False)
                found["has_turns"] = int(begins.sum()) > 2  # begin, end, and begin again
        return cls(**found)


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
    num_bad_values: int = 0
    num_ending_otherwise: int = 0
    num_with_turns: int = 0
    num_logprobs: int = 0
    logprob: float = 0.0
    num_impossible_logprobs: int = 0
    explained: ExplainedVariance = field(default_factory=ExplainedVariance)
    explained_of_targets: ExplainedVariance = field(default_factory=ExplainedVariance)
    micro_batches: Sequence[MicroBatches] = ()
    groups: Groups = field(default_factory=Groups)

    def add(self, response: InspectedResponse, group: str, columns: TokenColumns) -> None:
        """Add a response, of which `columns` are."""
        reward = response.reward
        self.num += 1
        self.reward += reward
        self.reward_squares += reward * reward
        self.low, self.high = min(self.low, reward), max(self.high, reward)
        if reward in self.rewards or len(self.rewards) <= _MOST_REWARDS:
            self.rewards[reward] = self.rewards.get(reward, 0) + 1
        self.groups.add(group, reward)
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
        self.num_bad_values += columns.num_bad_values
        self.num_ending_otherwise += columns.ends_otherwise
        self.num_with_turns += columns.has_turns
        self.explained.add(columns.moments)
        for one in self.micro_batches:
            one.add(columns.moments)
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
