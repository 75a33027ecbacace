"""What the rewards of groups say, with or without a critic: sums over a stream of responses."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vapo.diagnostics.value_truth.figure import UNKNOWN, Figure, Sums
from vapo.studies.inspection.figures import bootstrap_over_groups

_TINY = 1e-12


@dataclass
class Groups:
    """Rewards by group: five numbers for each, which is all that is kept."""

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
        """Take in groups that are none of these. No more can be added afterwards."""
        for own, more in zip(self._columns, other._columns, strict=True):
            own.extend(more)

    @property
    def _columns(self) -> Sequence[array[float]]:
        return self._count, self._sum, self._squares, self._low, self._high

    def figures(self, best: float, *, seed: int) -> GroupFigures:
        """`best`: the highest reward of all, which a right response has."""
        n, s, ss, low, high = (np.frombuffer(x) for x in self._columns)
        several = n >= 2
        within = np.maximum(ss - s * s / n, 0.0)
        share = np.where(several, n / np.maximum(n - 1, 1), 0.0)
        kept = several.astype(float)
        table = {
            "n": n * kept,
            "s": s * kept,
            "ss": ss * kept,
            "left_out": share**2 * within,
            "within": within * kept,
            "free": (n - 1) * kept,
        }
        bootstrap = bootstrap_over_groups(table, seed=seed, num_resamples=500)

        def of(name: str, num: str) -> Figure:
            def explained(t: Sums) -> Any:
                variance = t["ss"] / t["n"] - (t["s"] / t["n"]) ** 2
                least = _TINY * np.maximum(t["ss"] / t["n"], _TINY)
                return 1 - t[name] / t[num] / np.where(variance > least, variance, np.nan)

            return bootstrap.figure(explained) if several.any() else UNKNOWN

        num_several = int(several.sum())
        equal = several & (low == high)
        return GroupFigures(
            num_groups=len(n),
            num_several=num_several,
            size_mean=float(n.mean()) if len(n) else math.nan,
            all_best=float((equal & (low == best)).sum()) / max(num_several, 1),
            all_equal=float(equal.sum()) / max(num_several, 1),
            prompt_share=of("within", "free"),
            left_out_mean=of("left_out", "n"),
        )


@dataclass(frozen=True)
class GroupFigures:
    """What the groups' rewards say, with or without values.

    Of groups with two responses or more (`num_several`): the share whose rewards are all the best
    there is (`all_best`), or equal (`all_equal`), which a comparison within groups learns nothing
    from. `prompt_share`: the share of the rewards' variance that lies between prompts, which is
    the most that a critic of the prompt alone can explain. `left_out_mean`: the explained variance
    of the mean of a response's siblings, which a method without a critic subtracts.
    """

    num_groups: int
    num_several: int
    size_mean: float
    all_best: float
    all_equal: float
    prompt_share: Figure
    left_out_mean: Figure
