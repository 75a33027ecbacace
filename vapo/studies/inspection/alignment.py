"""Does the value at each token belong to the state before it, or is it off by one?

A value is that of the state before its token: it has not seen the token. The reward cannot tell.
With one reward at the end every token has the same return, and a later value knows more of it, so
that a shift always looks better. These tell, in this order:

- **Shared prefixes.** Two responses to one prompt that begin with the same d tokens are in the same
  state up to and including place d. The values of a sound file first differ at d + 1, those that
  have seen their own token at d, those that lag at d + 2. Values that begin alike whatever the
  tokens are, as t / n does at its first token, differ at one place of the response: so the
  differences must begin with the token where d is small and where it is larger.
- **Log-probs.** What a policy did not expect moves the value: |V[t+1] - V[t]| goes with the
  surprise of token t.
- **Tokens.** The token explains more of the change than its neighbours do.

All of them look at places between sampled tokens alone: what a framework writes as the value of a
token that an environment wrote, as verl its 0, is none.
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
    returns_of,
    sampled_places,
    valued,
)
from vapo.studies.inspection.responses import InspectedResponse

SHIFTS = (-1, 0, 1)
WORDS = {
    0: "each value is that of the state before its token",
    1: "each value has already seen its own token: values[:, P:] where values[:, P-1:-1] is right",
    -1: "each value lags by one: it is that of the state before the token before",
}
_OFFSETS = range(-2, 4)  # places around the first token that differs
_EQUAL = 0.25  # of the difference at the next place: it begins there
_NO_MORE_THAN = 0.005  # of the largest difference: rounding
_LEAST_PAIRS = 8  # of few and of many equal tokens, each
_LEAST_RESPONSES = 12
_RESAMPLES = 200
_CERTAIN = 0.975


@dataclass(frozen=True)
class Alignment:
    """The verdict of the off-by-one test.

    Attributes:
        shift: 0 sound, 1 the value has seen its own token, -1 it lags, None: nothing tells.
        text: one sentence with the figures.
        by: what told: "shared prefixes", "log-probs", "tokens" or "".
    """

    shift: int | None
    text: str
    by: str = ""


def alignment(responses: Sequence[InspectedResponse]) -> Alignment:
    """The verdict on the values of some responses, in whole groups."""
    kept = [r for r in responses if r.values is not None and len(r.values) >= 4]
    if len(kept) < 2:
        return Alignment(None, "off by one? There are no values to look at")
    why: list[str] = []
    for look in (_by_prefixes, _by_logprobs, _by_tokens):
        found = look(kept)
        if isinstance(found, Alignment):
            return found
        why.append(found)
    return Alignment(None, f"off by one? Nothing tells: {'; '.join(why)}")


def return_correlations(
    responses: Sequence[InspectedResponse], *, gamma: float
) -> tuple[float, ...] | None:
    """Of values with the returns at shifts -1, 0 and 1, at the same tokens; None without any.

    Later is better, whatever the alignment.
    """
    values, returns = [], []
    for response in responses:
        if (own := valued(response)) is None or len(places := inner_places(response)) == 0:
            continue
        at_token = np.cumsum(is_sampled(response, len(response.values or ())))[places] - 1
        values.append(np.asarray(response.values)[places + np.array(SHIFTS)[:, None]])
        returns.append(returns_of(own, gamma)[at_token])
    if not values:
        return None
    earned = np.concatenate(returns)
    return tuple(correlation(moved, earned) for moved in np.concatenate(values, axis=1))


# ---- shared prefixes -------------------------------------------------------------------------


def _by_prefixes(responses: Sequence[InspectedResponse]) -> Alignment | str:
    gaps, depths = [], []  # [pairs, offsets], NaN before the response; how many tokens are equal
    for first, second, place in _pairs(responses):
        depths.append(place)
        values = [np.asarray(one.values)[: place + _OFFSETS.stop] for one in (first, second)]
        apart = np.abs(values[0] - values[1])[max(place + _OFFSETS.start, 0) :]
        gaps.append(np.pad(apart, (len(_OFFSETS) - len(apart), 0), constant_values=np.nan))
    if len(gaps) < _LEAST_PAIRS:
        return f"{len(gaps)} pairs of responses to one prompt, with tokens and values"
    table = np.stack(gaps)
    means = {
        offset: float(np.nanmean(column))
        for offset, column in zip(_OFFSETS, table.T, strict=True)
        if np.isfinite(column).sum() >= _LEAST_PAIRS
    }
    spread = float(np.std(np.concatenate([_sampled_values(r) for r in responses])))
    if max(means.values()) <= 1e-3 * spread or spread == 0:
        return "values do not depend on the tokens of a response"
    figures = ", ".join(f"{gap:.2g} at {offset:+d}" for offset, gap in means.items())
    where = (
        f"{len(gaps):,} pairs of responses to one prompt, mean |difference| about the first token "
        f"that differs: {figures}"
    )
    floor = _NO_MORE_THAN * max(means.values())
    begins = {k: _begin_behind(k, table, np.array(depths), floor) for k in SHIFTS}
    for offset in SHIFTS:
        if begins[offset]:
            return Alignment(-offset, f"{WORDS[-offset]} ({where})", "shared prefixes")
    if None in begins.values():
        return (
            f"{sum(map(bool, depths)):,} of {len(gaps):,} pairs of responses to one prompt share "
            f"their first token, and {_LEAST_PAIRS} pairs that share few tokens and {_LEAST_PAIRS} "
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
    """Whether values are equal at an offset and not at the next, for pairs that share few tokens
    and for those that share more. None: there are too few pairs of one of the two.
    """
    column = _OFFSETS.index(offset)
    is_there = np.isfinite(table[:, column])
    cuts = np.unique(depths[is_there])[:-1]
    if len(cuts) == 0:
        return None
    least = [min(np.sum(depths[is_there] <= cut), np.sum(depths[is_there] > cut)) for cut in cuts]
    if max(least) < _LEAST_PAIRS:
        return None
    shares_few = depths <= cuts[int(np.argmax(least))]
    return all(
        _is_first_step(table[is_there & part][:, max(column - 1, 0) : column + 2], floor)
        for part in (shares_few, ~shares_few)
    )


def _is_first_step(gaps: np.ndarray, floor: float) -> bool:
    """Whether mean differences grow at the last of some places, and have not grown before it."""
    means = [float(np.mean(own)) for c in gaps.T if len(own := c[np.isfinite(c)]) >= _LEAST_PAIRS]
    *before, now, after = np.maximum(means, floor)
    return bool(now < _EQUAL * after) and all(gap >= _EQUAL * now for gap in before)


def _pairs(
    responses: Sequence[InspectedResponse],
) -> Iterator[tuple[InspectedResponse, InspectedResponse, int]]:
    """Neighbours of a group in the order of their tokens, and where they first differ; tokens
    around it are sampled."""
    groups: dict[str, list[InspectedResponse]] = defaultdict(list)
    for response in responses:
        if _units(response):
            groups[response.group].append(response)
    for group in groups.values():
        group.sort(key=_units)
        for first, second in pairwise(group):
            both = zip(_units(first), _units(second), strict=False)
            place = next((i for i, (a, b) in enumerate(both) if a != b), None)
            if place is not None and _is_sampled_around(place, first, second):
                yield first, second, place


def _is_sampled_around(place: int, *pair: InspectedResponse) -> bool:
    start, stop = max(place + _OFFSETS.start, 0), place + _OFFSETS.stop
    around = [is_sampled(one, len(one.values or ()))[start:stop] for one in pair]
    return all(len(own) == stop - start and bool(own.all()) for own in around)


def _sampled_values(response: InspectedResponse) -> np.ndarray:
    values = np.asarray(response.values)
    return values[sampled_places(response, len(values))]


def _units(response: InspectedResponse) -> tuple[str, ...] | tuple[int, ...]:
    return response.response_ids or response.tokens or ()


# ---- what moves the value --------------------------------------------------------------------


class _Moves(NamedTuple):
    """The changes of a response's value at shifts -1, 0, 1 about each token, and the tokens."""

    changes: np.ndarray  # [3, n]: V[t+1+k] - V[t+k]
    about: np.ndarray  # [n]: of token t, what may have caused it


def _by_logprobs(responses: Sequence[InspectedResponse]) -> Alignment | str:
    moves = [
        _Moves(np.abs(value_changes(r)), np.minimum(-np.asarray(r.logprobs)[inner_places(r)], 4.0))
        for r in responses
        if r.logprobs is not None and len(inner_places(r))
    ]
    if len(moves) < _LEAST_RESPONSES:
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
    if len(moves) < _LEAST_RESPONSES:
        return f"{len(moves)} responses with tokens"
    return _winner(moves, _explained, "share of the change that the token explains", "tokens")


def inner_places(response: InspectedResponse) -> np.ndarray:
    """Places of sampled tokens whose neighbours, one before and two after, are sampled, too."""
    own = is_sampled(response, len(response.values or ()))
    return np.flatnonzero(own[:-3] & own[1:-2] & own[2:-1] & own[3:]) + 1


def value_changes(response: InspectedResponse) -> np.ndarray:
    """[3, places]: what the token before, the token and the one after have done to the value."""
    steps = np.diff(np.asarray(response.values))  # steps[t]: what token t has done
    return steps[inner_places(response) + np.array(SHIFTS)[:, None]]


def _winner(
    moves: Sequence[_Moves], measure: Callable[[np.ndarray, np.ndarray], float], what: str, by: str
) -> Alignment | str:
    """The shift with the largest measure, if it is the largest in nearly every resample.

    With values that are V[t+s] in the place of V[t], the change that token t causes is found at
    the shift -s.
    """

    def of(rows: Sequence[_Moves]) -> list[float]:
        about = np.concatenate([row.about for row in rows])
        changes = np.concatenate([row.changes for row in rows], axis=1)
        return [measure(change, about) for change in changes]

    found = of(moves)
    figures = ", ".join(f"{x:.2f} at {k:+d}" for k, x in zip(SHIFTS, found, strict=True))
    best = int(np.argmax(found))
    if found[best] < 0.02:
        return f"{what}: {figures}"
    draw = np.random.default_rng(0)
    wins = [
        int(np.argmax(of([moves[i] for i in draw.integers(len(moves), size=len(moves))]))) == best
        for _ in range(_RESAMPLES)
    ]
    if np.mean(wins) < _CERTAIN:
        return f"{what}: {figures}, too close to tell"
    shift = -SHIFTS[best]
    return Alignment(shift, f"{WORDS[shift]} ({what}: {figures}; {len(moves):,} responses)", by)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    scale = float(np.std(a) * np.std(b))
    return float(np.mean((a - a.mean()) * (b - b.mean()))) / scale if scale > 1e-12 else 0.0


def _explained(change: np.ndarray, tokens: np.ndarray) -> float:
    """Eta squared of the tokens seen five times or more, less what chance would give."""
    counts = np.bincount(tokens)
    kept = counts[tokens] >= 5
    change, tokens = change[kept], tokens[kept]
    num, total = len(change), float(np.var(change)) * len(change)
    if num < 50 or total < 1e-12:
        return 0.0
    counts = np.bincount(tokens)
    sums = np.bincount(tokens, weights=change)
    seen = counts > 0
    between = float((sums[seen] ** 2 / counts[seen]).sum()) - float(change.sum()) ** 2 / num
    free = num - int(seen.sum())
    return 1 - (total - between) / total * (num - 1) / free if free > 0 else 0.0
