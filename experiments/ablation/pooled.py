"""The differences to the full system over several sizes of one task, pooled.

    python experiments/ablation/pooled.py TABLE.csv TABLE.csv [...] > pooled.md

Reads the table.csv of `vapo report`, one for each size, of tables with a t-interval for every
difference. Each row's differences are weighted by their inverse variances (Graybill and Deal
1959). The variances are estimated from few seeds, so the standard error has Meier's correction
(1953) and the interval Student's t with his degrees of freedom. The pooled figure describes
these sizes and does not predict another one. `p` tests whether all sizes have one difference.
A row whose seeds collapse at some size (their differences have a standard deviation above 10
points) is not pooled, because a variance over two kinds of runs cannot serve as a weight.
"""

from __future__ import annotations

import csv
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import chi2

from vapo.intervals import interval_text, t_quantile
from vapo.sweep.report.estimates import COLLAPSE_SPREAD
from vapo.sweep.report.tables import markdown_table


@dataclass(frozen=True)
class Difference:
    """The mean difference at one size, and the variance of that mean."""

    mean: float
    variance: float
    degrees: int

    @property
    def spread(self) -> float:
        """Standard deviation over seeds."""
        return math.sqrt(self.variance * (self.degrees + 1))


@dataclass(frozen=True)
class Pooled:
    mean: float
    low: float
    high: float
    p: float


def differences(path: Path) -> dict[str, Difference]:
    """The difference of each row, from the mean and the t-interval of its paired differences."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["difference_low"]]
    by_row = {}
    for row in rows:
        degrees = int(row.get("common_seeds") or row["num_runs"]) - 1
        half = (float(row["difference_high"]) - float(row["difference_low"])) / 2
        error = half / t_quantile(degrees)
        by_row[row["row"]] = Difference(float(row["difference"]), error**2, degrees)
    return by_row


def pool(parts: list[Difference]) -> Pooled:
    weights = [1 / part.variance for part in parts]
    shares = [weight / sum(weights) for weight in weights]
    mean = sum(share * part.mean for share, part in zip(shares, parts, strict=True))
    weighted_variance = sum(
        s * (1 - s) / part.degrees for s, part in zip(shares, parts, strict=True)
    )
    error = math.sqrt((1 + 4 * weighted_variance) / sum(weights))
    degrees = 1 / sum(s**2 / part.degrees for s, part in zip(shares, parts, strict=True))
    half = t_quantile(degrees) * error
    apart = sum(w * (part.mean - mean) ** 2 for w, part in zip(weights, parts, strict=True))
    return Pooled(mean, mean - half, mean + half, float(chi2.sf(apart, len(parts) - 1)))


def table(sizes: list[dict[str, Difference]]) -> str:
    """The rows that every size has, in the first one's order."""
    lines = []
    for name in sizes[0]:
        parts = [size[name] for size in sizes if name in size]
        if len(parts) < len(sizes):
            continue
        if max(part.spread for part in parts) > COLLAPSE_SPREAD:
            lines.append([name, "not pooled: seeds collapse", ""])
            continue
        pooled = pool(parts)
        text = interval_text(pooled.mean, (pooled.low, pooled.high), "+.1f")
        lines.append([name, text, f"{pooled.p:.2g}"])
    titles = ["row", "difference to the full system, pooled", "p that the sizes agree"]
    return markdown_table(titles, lines, align="lr") + "\n"


if __name__ == "__main__":
    print(table([differences(Path(path)) for path in sys.argv[1:]]), end="")
