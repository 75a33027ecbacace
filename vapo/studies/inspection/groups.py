"""Figures of the rewards of groups, from sums over a stream of responses. They need no critic."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vapo.intervals import UNKNOWN, Figure, Sums
from vapo.studies.inspection.figures import bootstrap_over_groups

_TINY = 1e-12


@dataclass
class Groups:
    """Collects five sums of rewards for each group: count, sum, sum of squares, lowest and
    highest.
    """

    _number: dict[str, int] = field(default_factory=dict)
    _count: array[float] = field(default_factory=lambda: array("d"))
    _sum: array[float] = field(default_factory=lambda: array("d"))
    _squares: array[float] = field(default_factory=lambda: array("d"))
    _low: array[float] = field(default_factory=lambda: array("d"))
    _high: array[float] = field(default_factory=lambda: array("d"))

    def add(self, group: str, reward: float) -> None:
        number = self._number.setdefault(group, len(self._number))
        if number == len(self._count):
            for column, x in zip(self._columns, (0.0, 0.0, 0.0, reward, reward), strict=True):
                column.append(x)
        self._count[number] += 1
        self._sum[number] += reward
        self._squares[number] += reward * reward
        self._low[number] = min(self._low[number], reward)
        self._high[number] = max(self._high[number], reward)

    def extend(self, other: Groups) -> None:
        """Append another's groups, which must all be new here.

        No reward may be added afterwards.
        """
        for column, addition in zip(self._columns, other._columns, strict=True):
            column.extend(addition)

    @property
    def _columns(self) -> Sequence[array[float]]:
        return self._count, self._sum, self._squares, self._low, self._high

    def figures(self, best: float, *, seed: int) -> GroupFigures:
        """Compute the figures of all groups' rewards.

        Args:
            best: the highest reward in the whole stream.
            seed: for the bootstraps.
        """
        n, s, ss, low, high = (np.frombuffer(x) for x in self._columns)
        several = n >= 2
        within = np.maximum(ss - s * s / n, 0.0)
        factor = np.where(several, n / np.maximum(n - 1, 1), 0.0)
        weight = several.astype(float)
        table = {
            "n": n * weight,
            "s": s * weight,
            "ss": ss * weight,
            "left_out": factor**2 * within,
            "within": within * weight,
            "free": (n - 1) * weight,
        }
        bootstrap = bootstrap_over_groups(table, seed=seed, num_resamples=500)

        def explained_by(residual: str, num: str) -> Figure:
            def share(t: Sums) -> Any:
                variance = t["ss"] / t["n"] - (t["s"] / t["n"]) ** 2
                rounding = _TINY * np.maximum(t["ss"] / t["n"], _TINY)
                return 1 - t[residual] / t[num] / np.where(variance > rounding, variance, np.nan)

            return bootstrap.figure(share) if several.any() else UNKNOWN

        num_several = int(several.sum())
        equal = several & (low == high)
        return GroupFigures(
            num_groups=len(n),
            num_several=num_several,
            size_mean=float(n.mean()) if len(n) else math.nan,
            all_best=float((equal & (low == best)).sum()) / max(num_several, 1),
            all_equal=float(equal.sum()) / max(num_several, 1),
            prompt_share=explained_by("within", "free"),
            left_out_mean=explained_by("left_out", "n"),
        )


@dataclass(frozen=True)
class GroupFigures:
    """Figures of the groups' rewards.

    All but `num_groups` and `size_mean` are over the groups with two responses or more.

    Attributes:
        num_several: the number of groups with two responses or more.
        size_mean: responses in a group, on average.
        all_best: the share of groups in which all rewards are the best reward of any response.
        all_equal: the share of groups whose rewards are all equal, so that a comparison within the
            group learns nothing.
        prompt_share: the share of the rewards' variance that lies between prompts, which is the
            most that a critic of the prompt alone can explain.
        left_out_mean: the share of the variance that the mean reward of the group's other responses
            explains. A method without a critic subtracts that mean.
    """

    num_groups: int
    num_several: int
    size_mean: float
    all_best: float
    all_equal: float
    prompt_share: Figure
    left_out_mean: Figure
