"""An estimate with its interval. Imports no torch, so that a file is inspected without it."""

from __future__ import annotations

import math
from typing import NamedTuple


class Figure(NamedTuple):
    """An estimate with its 95 % interval; NaN where it cannot be estimated."""

    value: float
    low: float
    high: float

    @property
    def is_unknown(self) -> bool:
        return math.isnan(self.value)

    @property
    def is_bounded(self) -> bool:
        """Whether the interval has limits: with few prompts, or a truth that does not move beyond
        the noise, it has none."""
        return math.isfinite(self.low) and math.isfinite(self.high)


UNKNOWN = Figure(math.nan, math.nan, math.nan)
