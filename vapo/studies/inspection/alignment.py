"""Does the value at each token belong to the state before it, or is it off by one?

The right value of a token is that of the state before it, which has not seen the token. Rewards
cannot decide the question. With one reward at the end every token has the same return, and a later
value knows more of it, so a shift always looks better. Three tests can decide it. They are tried in
this order:

- **Shared prefixes.** Two responses to one prompt that begin with the same d tokens are in the same
  state up to and including place d. The values of a sound file first differ at d + 1, values that
  have seen their own token at d, and values that lag at d + 2. Some values depend on the place
  alone, as t / n does at its first token. They begin to differ at one place of the response. So the
  differences must begin at the token both for pairs that share few tokens and for pairs that share
  more.
- **Log-probs.** A token that the policy did not expect moves the value: |V[t+1] - V[t]| is large
  where the surprise of token t is large.
- **Tokens.** The token explains more of the change than its neighbours do.

All tests look only at places between sampled tokens. A framework may write any number as the value
of a token from an environment (verl writes 0), and such a number is not a value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from vapo.studies.inspection.group_sample import (
    is_sampled,
    response_values,
    returns_of,
    sampled_places,
)
from vapo.studies.inspection.responses import InspectedResponse

SHIFTS = (-1, 0, 1)
WORDS = {
    0: "each value is that of the state before its token",
    1: "each value has already seen its own token: values[:, P:] where values[:, P-1:-1] is right",
    -1: "each value lags by one: it is that of the state before the token before",
}
_OFFSETS = range(-2, 4)  # places around the first token that differs
_EQUAL = 0.25  # share of the next place's difference, below which a place counts as equal
_ROUNDING = 0.005  # share of the largest difference that rounding may cause
_NO_TOKENS = "values do not depend on the tokens of a response"
_MIN_PAIRS = 8  # pairs with few equal tokens, and as many with more
_MIN_RESPONSES = 12
_RESAMPLES = 200
_CERTAIN = 0.975


@dataclass(frozen=True)
class Alignment:
    """The verdict of an off-by-one test on a file's values.

    Attributes:
        shift: 0 if each value belongs to the state before its token, 1 if it has seen its own
            token, -1 if it lags by one token, None if no test decides.
        text: one sentence with the figures.
        by: the test that decided: "shared prefixes", "log-probs", "tokens", "advantages" or
            "critic"; "" if none did.
        is_undecidable: whether more such responses would not decide it either, because no value
            depends on the tokens of its response.
    """

    shift: int | None
    text: str
    by: str = ""
    is_undecidable: bool = False


def alignment(responses: Sequence[InspectedResponse]) -> Alignment:
    """Return the verdict on whether the values of some responses are off by one token.

    All responses to a prompt must be there.
    """
    with_values = [r for r in responses if r.values is not None and len(r.values) >= 4]
    if len(with_values) < 2:
        return Alignment(None, "off by one? There are no values to look at")
    reasons: list[str] = []
    for test in (_by_prefixes, _by_logprobs, _by_tokens):
        verdict = test(with_values)
        if isinstance(verdict, Alignment):
            return verdict
        reasons.append(verdict)
    text = f"off by one? Nothing tells: {'; '.join(reasons)}"
    return Alignment(None, text, is_undecidable=_NO_TOKENS in reasons)


def return_correlations(
    responses: Sequence[InspectedResponse], *, gamma: float
) -> tuple[float, ...] | None:
    """Return the correlations of values and returns, for values shifted by -1, 0 and 1 tokens.

    All three are over the same tokens. The result is None if no token can be used. Values from
    later tokens correlate better, even in a file without a mistake.
    """
    values, returns = [], []
    for response in responses:
        numbers = response_values(response)
        if numbers is None or len(places := inner_places(response)) == 0:
            continue
        at_token = np.cumsum(is_sampled(response, len(response.values or ())))[places] - 1
        values.append(np.asarray(response.values)[places + np.array(SHIFTS)[:, None]])
        returns.append(returns_of(numbers, gamma)[at_token])
    if not values:
        return None
    all_returns = np.concatenate(returns)
    return tuple(correlation(shifted, all_returns) for shifted in np.concatenate(values, axis=1))


# ---- shared prefixes -------------------------------------------------------------------------


def _by_prefixes(responses: Sequence[InspectedResponse]) -> Alignment | str:
    gaps = []  # [pairs, offsets]: |difference of the values|, NaN before the response begins
    depths = []  # [pairs]: how many tokens are equal
    for *pair, place in _pairs(responses):
        depths.append(place)
        values = [np.asarray(response.values)[: place + _OFFSETS.stop] for response in pair]
        apart = np.abs(values[0] - values[1])[max(place + _OFFSETS.start, 0) :]
        gaps.append(np.pad(apart, (len(_OFFSETS) - len(apart), 0), constant_values=np.nan))
    if len(gaps) < _MIN_PAIRS:
        return f"{len(gaps)} pairs of responses to one prompt, with tokens and values"
    table = np.stack(gaps)
    means = {
        offset: float(np.nanmean(column))
        for offset, column in zip(_OFFSETS, table.T, strict=True)
        if np.isfinite(column).sum() >= _MIN_PAIRS
    }
    spread = float(np.std(np.concatenate([_sampled_values(r) for r in responses])))
    if max(means.values()) <= 1e-3 * spread or spread == 0:
        return _NO_TOKENS
    figures = ", ".join(f"{gap:.2g} at {offset:+d}" for offset, gap in means.items())
    where = (
        f"{len(gaps):,} pairs of responses to one prompt, mean |difference| about the first token "
        f"that differs: {figures}"
    )
    floor = _ROUNDING * max(means.values())
    begins = {k: _begin_behind(k, table, np.array(depths), floor) for k in SHIFTS}
    for offset in SHIFTS:
        if begins[offset]:
            return Alignment(-offset, f"{WORDS[-offset]} ({where})", "shared prefixes")
    if None in begins.values():
        return (
            f"{sum(map(bool, depths)):,} of {len(gaps):,} pairs of responses to one prompt share "
            f"their first token, and {_MIN_PAIRS} pairs that share few tokens and {_MIN_PAIRS} "
            f"that share more are needed ({where})"
        )
    if means.get(-1, 0.0) > _EQUAL * means[1]:
        return (
            "responses that begin alike have different values there already, so the values know "
            f"what comes later, or are noisy ({where})"
        )
    return (
        "differences do not begin at one place about the first token that differs, so the values "
        f"know what comes later, or go by the place ({where})"
    )


def _begin_behind(offset: int, table: np.ndarray, depths: np.ndarray, floor: float) -> bool | None:
    """Whether values of two responses are equal at an offset and differ at the next one.

    This must hold on average for the pairs that share few tokens and for those that share more. The
    result is None if either kind has too few pairs.

    Args:
        offset: the distance in tokens from the first token that differs.
        table: [pairs, offsets] absolute differences of values, NaN before the response begins.
        depths: [pairs] numbers of equal tokens at the start.
        floor: smaller mean differences count as this large.
    """
    column = _OFFSETS.index(offset)
    is_there = np.isfinite(table[:, column])
    limits = np.unique(depths[is_there])[:-1]
    if len(limits) == 0:
        return None
    present = depths[is_there]
    smaller_sides = [min(np.sum(present <= limit), np.sum(present > limit)) for limit in limits]
    if max(smaller_sides) < _MIN_PAIRS:
        return None
    shares_few = depths <= limits[int(np.argmax(smaller_sides))]
    return all(
        _is_first_step(table[is_there & is_side][:, max(column - 1, 0) : column + 2], floor)
        for is_side in (shares_few, ~shares_few)
    )


def _is_first_step(gaps: np.ndarray, floor: float) -> bool:
    """Whether the mean difference grows at the last column, and has not grown before it.

    Args:
        gaps: [pairs, offsets] absolute differences, with NaN where a pair has none.
        floor: smaller means count as this large.
    """
    columns = [column[np.isfinite(column)] for column in gaps.T]
    means = [float(np.mean(column)) for column in columns if len(column) >= _MIN_PAIRS]
    *earlier, current, following = np.maximum(means, floor)
    has_step = bool(current < _EQUAL * following)
    return has_step and all(gap >= _EQUAL * current for gap in earlier)


def _pairs(
    responses: Sequence[InspectedResponse],
) -> Iterator[tuple[InspectedResponse, InspectedResponse, int]]:
    """Yield pairs of responses to one prompt, with the index of the first token that differs.

    The responses to a prompt are sorted by their tokens, and neighbours make a pair. A pair is left
    out if a token around the index is missing or was not sampled.
    """
    groups: dict[str, list[InspectedResponse]] = defaultdict(list)
    for response in responses:
        if _units(response):
            groups[response.group].append(response)
    for group in groups.values():
        group.sort(key=_units)
        for first, second in pairwise(group):
            unit_pairs = zip(_units(first), _units(second), strict=False)
            place = next((i for i, (a, b) in enumerate(unit_pairs) if a != b), None)
            if place is not None and _is_sampled_around(place, first, second):
                yield first, second, place


def _is_sampled_around(place: int, *pair: InspectedResponse) -> bool:
    start, stop = max(place + _OFFSETS.start, 0), place + _OFFSETS.stop
    flags = [is_sampled(response, len(response.values or ()))[start:stop] for response in pair]
    return all(len(flag) == stop - start and bool(flag.all()) for flag in flags)


def _sampled_values(response: InspectedResponse) -> np.ndarray:
    values = np.asarray(response.values)
    return values[sampled_places(response, len(values))]


def _units(response: InspectedResponse) -> tuple[str, ...] | tuple[int, ...]:
    """Return the response's token ids; if it has none, its tokens' texts; if it has neither, ()."""
    return response.response_ids or response.tokens or ()


# ---- what moves the value --------------------------------------------------------------------


class _Moves(NamedTuple):
    """The changes of one response's value around each token, and what may have caused them."""

    changes: np.ndarray  # [3, n]: V[t+1+k] - V[t+k] for shifts k of -1, 0 and 1
    causes: np.ndarray  # [n]: token t's surprise, or its number


def _by_logprobs(responses: Sequence[InspectedResponse]) -> Alignment | str:
    moves = [
        _Moves(np.abs(value_changes(r)), np.minimum(-np.asarray(r.logprobs)[inner_places(r)], 4.0))
        for r in responses
        if r.logprobs is not None and len(inner_places(r))
    ]
    if len(moves) < _MIN_RESPONSES:
        return f"{len(moves)} responses with log-probs"
    return _winner(moves, correlation, "correlation of |change| with surprise", "log-probs")


def _by_tokens(responses: Sequence[InspectedResponse]) -> Alignment | str:
    names: dict[int | str, int] = {}
    moves = []
    for response in responses:
        units, places = _units(response), inner_places(response)
        if units and len(places):
            numbers = [names.setdefault(units[place], len(names)) for place in places]
            moves.append(_Moves(value_changes(response), np.asarray(numbers)))
    if len(moves) < _MIN_RESPONSES:
        return f"{len(moves)} responses with tokens"
    return _winner(moves, _explained, "share of the change that the token explains", "tokens")


def inner_places(response: InspectedResponse) -> np.ndarray:
    """Return the indices of the sampled tokens with one sampled token before and two after."""
    flags = is_sampled(response, len(response.values or ()))
    return np.flatnonzero(flags[:-3] & flags[1:-2] & flags[2:-1] & flags[3:]) + 1


def value_changes(response: InspectedResponse) -> np.ndarray:
    """Return [3, n] changes of the value by the token before each inner token, by it, by the next.

    The n inner tokens are those of `inner_places`.
    """
    steps = np.diff(np.asarray(response.values))  # steps[t]: the change by token t
    return steps[inner_places(response) + np.array(SHIFTS)[:, None]]


def _winner(
    moves: Sequence[_Moves],
    measure: Callable[[np.ndarray, np.ndarray], float],
    measure_text: str,
    by: str,
) -> Alignment | str:
    """Return the shift with the largest measure, or a text if no shift is clearly the best.

    The shift must be the best in nearly every resample of the responses. If a file has V[t+s] in
    the place of V[t], the change that token t causes stands at the shift -s.

    Args:
        measure: maps changes and causes to how well the causes explain the changes.
        measure_text: the measure's name for the verdict.
        by: the test's name for the verdict.
    """

    def measure_by_shift(rows: Sequence[_Moves]) -> list[float]:
        causes = np.concatenate([row.causes for row in rows])
        changes = np.concatenate([row.changes for row in rows], axis=1)
        return [measure(change, causes) for change in changes]

    measures = measure_by_shift(moves)
    figures = ", ".join(f"{x:.2f} at {k:+d}" for k, x in zip(SHIFTS, measures, strict=True))
    best = int(np.argmax(measures))
    if measures[best] < 0.02:
        return f"{measure_text}: {figures}"
    draw = np.random.default_rng(0)
    num_wins = 0
    for _ in range(_RESAMPLES):
        rows = [moves[i] for i in draw.integers(len(moves), size=len(moves))]
        num_wins += int(np.argmax(measure_by_shift(rows))) == best
    if num_wins / _RESAMPLES < _CERTAIN:
        return f"{measure_text}: {figures}, too close to tell"
    shift = -SHIFTS[best]
    evidence = f"{measure_text}: {figures}; {len(moves):,} responses"
    return Alignment(shift, f"{WORDS[shift]} ({evidence})", by)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    scale = float(np.std(a) * np.std(b))
    return float(np.mean((a - a.mean()) * (b - b.mean()))) / scale if scale > 1e-12 else 0.0


def _explained(change: np.ndarray, tokens: np.ndarray) -> float:
    """Return the share of the changes' variance that the token explains, less what chance would
    give.

    This is eta squared with a correction for degrees of freedom, over the tokens that occur five
    times or more. It is 0.0 with fewer than 50 changes.
    """
    counts = np.bincount(tokens)
    is_frequent = counts[tokens] >= 5
    change, tokens = change[is_frequent], tokens[is_frequent]
    num, total = len(change), float(np.var(change)) * len(change)
    if num < 50 or total < 1e-12:
        return 0.0
    counts = np.bincount(tokens)
    sums = np.bincount(tokens, weights=change)
    occurs = counts > 0
    between = float((sums[occurs] ** 2 / counts[occurs]).sum()) - float(change.sum()) ** 2 / num
    free = num - int(occurs.sum())
    return 1 - (total - between) / total * (num - 1) / free if free > 0 else 0.0
