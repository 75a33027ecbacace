"""Figures of critics that are wrong in one way each."""

from __future__ import annotations

import math
from typing import Any

from vapo.diagnostics.value_truth.figures import TruthFigures
from vapo.intervals import UNKNOWN, Figure


def near(value: float, half: float = 0.04) -> Figure:
    return Figure(value, value - half, value + half)


def wide(value: float) -> Figure:
    """As with fewer than four prompts."""
    return Figure(value, -math.inf, math.inf)


EXACT: dict[str, Any] = {
    "num_prompts": 64,
    "num_responses": 256,
    "num_prefixes": 1500,
    "num_continuations": 16,
    "num_mistakes": 40,
    "bias": near(0.0),
    "mse": near(0.02, 0.01),
    "baseline_mse": near(0.5),
    "variance": near(0.6),
    "within_variance": near(0.3),
    "between_variance": near(0.3),
    "explained": near(0.95),
    "explained_within": near(0.93),
    "explained_between": near(0.95),
    "flattening": near(0.98),
    "rank_agreement": near(0.95),
    "mistake_precision": near(0.9),
    "mistake_recall": near(0.88),
    "mistake_recall_ceiling": near(0.93),
    "by_position": {
        "position": [0.05, 0.55, 0.95],
        "num_prefixes": [500, 500, 500],
        "truth_mean": [0.2, 0.3, 0.4],
        "value_mean": [0.2, 0.3, 0.4],
        "bias": [0.0, 0.0, 0.0],
        "mse": [0.02, 0.02, 0.02],
    },
}


def figures(**differing: Any) -> TruthFigures:
    """An exact critic's, but for those that are given."""
    return TruthFigures(**(EXACT | differing))


def wide_figures(**differing: Any) -> TruthFigures:
    """The same with intervals that say nothing."""
    found: dict[str, Any] = {
        name: wide(value.value) if isinstance(value, Figure) else value
        for name, value in EXACT.items()
    }
    return TruthFigures(**(found | differing))


def without_critic() -> TruthFigures:
    of_the_truth = ("variance", "within_variance", "between_variance")
    found: dict[str, Any] = {
        name: UNKNOWN if isinstance(value, Figure) and name not in of_the_truth else value
        for name, value in EXACT.items()
    }
    return TruthFigures(**found)
