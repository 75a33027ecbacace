"""Figures of the value truth against exact values, on episodes whose chances are known."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from statistics import fmean, pstdev

import numpy as np
import pytest

from vapo.diagnostics.value_truth.figures import TruthFigures, truth_figures
from vapo.diagnostics.value_truth.mistakes import first_clear_fall, largest_fall
from vapo.diagnostics.value_truth.points import TruthPoint, true_value_interval

OUTCOMES = (-1.0, 1.0)


def chances(rng: Random, num_steps: int) -> list[float]:
    """The chance of success before each step, of a walk in which each step may fail for good.

    A prompt has a hazard; after a failure 5 % of the responses are right all the same.
    """
    hazard = rng.choice((0.02, 0.1, 0.3))
    found, failed = [], False
    for step in range(num_steps):
        left = (1 - hazard) ** (num_steps - step)
        found.append(0.05 if failed else left + 0.05 * (1 - left))
        failed = failed or rng.random() < hazard
    return found


def points_of(seed: int, k: int, *, num_prompts: int = 40, critic=lambda t, start: t):
    """Points with K draws each, and their exact values; `critic(value, prompt's value)`."""
    rng, draws = Random(seed), np.random.default_rng(seed)
    points, exact, row = [], [], 0
    for prompt in range(num_prompts):
        state = rng.getstate()
        for _ in range(3):
            rng.setstate(state)
            steps = chances(rng, 8)
            rng = Random(1000 * seed + row)
            for place, chance in enumerate(steps):
                returns = tuple(2.0 * draws.binomial(1, chance, size=k) - 1)
                value = 2 * chance - 1
                exact.append(value)
                points.append(
                    TruthPoint(str(prompt), row, place, 8, returns, critic(value, 2 * steps[0] - 1))
                )
            row += 1
    return points, exact


def corrected(k: int, name: str, num: int = 60, **kwargs) -> tuple[float, float]:
    """The mean of a figure over draws of the continuations, and that mean's standard error."""
    values = []
    for seed in range(num):
        points, _ = points_of(seed, k, **kwargs)
        values.append(getattr(truth_figures(points, outcomes=OUTCOMES, seed=0), name).value)
    return fmean(values), pstdev(values) / math.sqrt(num)
