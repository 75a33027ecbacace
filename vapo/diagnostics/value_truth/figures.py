"""How far the critic is from the truth: figures from which the continuations' noise is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vapo.diagnostics.position_profiles import Profile
from vapo.diagnostics.value_truth.points import Figure, TruthPoint


@dataclass(frozen=True)
class TruthFigures:
    """What `truth_figures` says of a critic's values V beside the true ones T, in reward units.

    Of all prefixes: `bias` mean of V - T, `mse` mean of (V - T)^2, `baseline_mse` the same of the
    mean return of the other responses to the prompt, `variance` of T, and `explained`
    1 - Var(T - V) / Var(T). Of responses that were continued from every step:
    `explained_within` the same of the differences from a response's mean, `explained_between` of
    the means of prompts, `flattening` the spread of V within a response / that of T,
    `rank_agreement` the share of pairs of steps that V puts in T's order (pairs whose intervals
    do not overlap), `mistake_recall` the share of responses with a clear fall of T in which V's
    largest fall is at T's first clear one, `mistake_precision` the share of V's largest falls, as
    many as there are such responses, that are at one. NaN where there is nothing to estimate it
    of. `by_position`: columns position, num_prefixes, truth_mean, value_mean, bias, mse.
    """

    num_prompts: int
    num_responses: int
    num_prefixes: int
    num_continuations: int
    bias: Figure
    mse: Figure
    baseline_mse: Figure
    variance: Figure
    within_variance: Figure
    between_variance: Figure
    explained: Figure
    explained_within: Figure
    explained_between: Figure
    flattening: Figure
    rank_agreement: Figure
    mistake_precision: Figure
    mistake_recall: Figure
    by_position: Profile


def truth_figures(
    points: Sequence[TruthPoint], *, outcomes: tuple[float, float] | None, seed: int
) -> TruthFigures:
    raise NotImplementedError
