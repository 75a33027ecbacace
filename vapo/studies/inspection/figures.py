"""What a critic's values are worth beside the returns: figures with intervals over prompts.

Every figure is a function of sums over groups (the responses to one prompt of one step), so its
interval is a bootstrap over groups. The return of a token is its response's reward, discounted to
it (or what it earns from the token on, where rewards come along the way): what the critic should
predict, whatever lambda it was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vapo.diagnostics.value_truth.figure import Bootstrap, Figure, Sums
from vapo.studies.inspection.group_sample import Tokens

OUTSIDE_BY = 0.25  # of the returns' range: values beyond it belong to no sound critic
_MAX_DRAWN = 2000  # groups that are drawn one by one; of more, bags of groups
_GROUPS_IN_BIN = 8  # of response lengths
_TINY = 1e-12  # of the squared values: what float arithmetic may leave of a variance of 0


def bootstrap_over_groups(
    table: Mapping[str, np.ndarray], *, seed: int, num_resamples: int
) -> Bootstrap:
    """Of sums over many groups, bags of groups are drawn.

    Args:
        table: name -> a number for each group.
    """
    draw = np.random.default_rng(seed)
    num_groups = len(next(iter(table.values())))
    if num_groups > _MAX_DRAWN:
        bags = draw.permutation(num_groups) % _MAX_DRAWN
        table = {k: np.bincount(bags, weights=x, minlength=_MAX_DRAWN) for k, x in table.items()}
    return Bootstrap(table, min(num_groups, _MAX_DRAWN), draw, num_resamples)


@dataclass(frozen=True)
class CriticFigures:
    """Values V beside returns R, over all tokens unless it says otherwise.

    `explained` 1 - Var(R - V) / Var(R), in one piece; `explained_unshifted` 1 - E[(R - V)^2] /
    Var(R), which counts a constant shift as an error. `bias` E[V - R]. `slope` and `intercept` of
    the line that predicts R from V: 1 and 0 for a calibrated critic. `correlation` of V and R.
    `spread` sd(V) / sd(R). `outside`: share of the tokens whose value is no possible return.

    `explained_between`: of what prompts are worth, by the values before the first token, the
    noise of few responses taken away; `explained_within`: of the differences within a group.
    `value_between`: the share of V's variance that lies between groups. `siblings_ahead`: what the
    mean reward of the other responses explains, less what V does, of the tokens that have both.

    `by_length`: the share of V's variance that position and response length alone explain, and
    `return_by_length` of R's, as other groups tell;
    `explained_beyond_length`: `explained` of what they leave of V and R. `length_correlation` of a
    response's mean value with its length, `reward_length_correlation` of its reward.
    `later_share` of the tokens come after their response's first one.
    """

    num_groups: int
    num_responses: int
    num_tokens: int
    value_mean: float
    value_std: float
    return_mean: float
    return_std: float
    later_share: float
    explained: Figure
    explained_unshifted: Figure
    bias: Figure
    slope: Figure
    intercept: Figure
    correlation: Figure
    spread: Figure
    outside: Figure
    explained_between: Figure
    explained_within: Figure
    value_between: Figure
    siblings_ahead: Figure
    by_length: Figure
    return_by_length: Figure
    explained_beyond_length: Figure
    length_correlation: Figure
    reward_length_correlation: Figure


def critic_figures(tokens: Tokens, *, seed: int, num_resamples: int = 500) -> CriticFigures | None:
    """Every figure, of tokens with values; None without any."""
    if not len(tokens.values):
        return None
    v, r = tokens.values, tokens.returns
    sums = _token_sums(tokens) | _group_sums(tokens) | _length_sums(tokens) | _row_sums(tokens)
    sums |= _sibling_sums(tokens)
    of = bootstrap_over_groups(sums, seed=seed, num_resamples=num_resamples).figure
    least = _TINY * float(np.square(r).max() or 1.0)

    def known(variance: Any) -> Any:
        """NaN in the place of a variance that is rounding alone."""
        return np.where(variance > least, variance, np.nan)

    return CriticFigures(
        num_groups=int((tokens.by_group(np.ones_like(v)) > 0).sum()),
        num_responses=len(tokens.rewards),
        num_tokens=len(v),
        value_mean=float(v.mean()),
        value_std=float(v.std()),
        return_mean=float(r.mean()),
        return_std=float(r.std()),
        later_share=float((tokens.position > 0).mean()),
        explained=of(lambda s: 1 - _var(s, "d") / known(_var(s, "r"))),
        explained_unshifted=of(lambda s: 1 - s["dd"] / s["n"] / known(_var(s, "r"))),
        bias=of(lambda s: s["d"] / s["n"]),
        slope=of(_slope),
        intercept=of(lambda s: s["r"] / s["n"] - _slope(s) * s["v"] / s["n"]),
        correlation=of(lambda s: _cov(s) / np.sqrt(known(_var(s, "v")) * known(_var(s, "r")))),
        spread=of(lambda s: np.sqrt(np.maximum(_var(s, "v"), 0.0) / known(_var(s, "r")))),
        outside=of(lambda s: s["outside"] / s["n"]),
        explained_between=of(_between),
        explained_within=of(lambda s: 1 - s["within_d"] / known(s["within_r"])),
        value_between=of(lambda s: 1 - s["within_all_v"] / (s["n"] * known(_var(s, "v")))),
        siblings_ahead=of(_siblings_ahead),
        by_length=of(lambda s: 1 - s["left_vv"] / (s["n"] * known(_var(s, "v")))),
        return_by_length=of(lambda s: 1 - s["left_rr"] / (s["n"] * known(_var(s, "r")))),
        explained_beyond_length=of(lambda s: 1 - s["left_dd"] / known(s["left_rr"])),
        length_correlation=of(lambda s: _row_correlation(s, "mean")),
        reward_length_correlation=of(lambda s: _row_correlation(s, "reward")),
    )


def _token_sums(tokens: Tokens) -> dict[str, np.ndarray]:
    v, r = tokens.values, tokens.returns
    low, high = r.min(), r.max()
    margin = OUTSIDE_BY * (high - low)
    columns = {
        "n": np.ones_like(v),
        "v": v,
        "r": r,
        "d": v - r,
        "vv": v * v,
        "rr": r * r,
        "vr": v * r,
        "dd": (v - r) ** 2,
        "outside": ((v < low - margin) | (v > high + margin)).astype(float),
    }
    return {name: tokens.by_group(x) for name, x in columns.items()}


def _group_sums(tokens: Tokens) -> dict[str, np.ndarray]:
    """Between groups by the first values, and within those that have two responses or more."""
    v, r, num = tokens.values, tokens.returns, tokens.num_groups
    n = np.maximum(tokens.by_group(np.ones_like(v)), 1)

    def within(x: np.ndarray) -> np.ndarray:
        mean = tokens.by_group(x) / n
        return tokens.by_group((x - mean[tokens.group]) ** 2)

    size = np.bincount(tokens.row_groups, minlength=num).astype(float)
    several = size >= 2
    first = tokens.position == 0
    row_group, rows = tokens.group[first], tokens.row[first]
    start = np.bincount(row_group, minlength=num).astype(float)
    counts = np.maximum(start, 1)
    reward = np.bincount(row_group, weights=r[first], minlength=num) / counts
    value = np.bincount(row_group, weights=v[first], minlength=num) / counts
    squares = (r[first] - reward[row_group]) ** 2
    noise = np.bincount(row_group, weights=squares, minlength=num) / np.maximum(start - 1, 1)
    noise /= counts
    used = ((start >= 2) & several).astype(float)
    assert len(rows) == len(row_group)
    found = {"prompts": np.ones(num), "m": reward, "mm": reward**2 - noise}
    found |= {"e": reward - value, "ee": (reward - value) ** 2 - noise}
    columns = {name: np.where(used > 0, x, 0.0) for name, x in found.items()}
    of_several = {"within_r": within(r), "within_d": within(v - r), "within_v": within(v)}
    columns |= {name: np.where(several, x, 0.0) for name, x in of_several.items()}
    return columns | {"within_all_v": within(v)}


def _sibling_sums(tokens: Tokens) -> dict[str, np.ndarray]:
    """Of the tokens of groups of two responses or more: R, R - V, and R less the siblings' mean."""
    size = np.bincount(tokens.row_groups, minlength=tokens.num_groups)
    total = np.bincount(tokens.row_groups, weights=tokens.rewards, minlength=tokens.num_groups)
    others = np.maximum(size - 1, 1)[tokens.row_groups]
    mean = (total[tokens.row_groups] - tokens.rewards) / others
    has_both = (size >= 2)[tokens.group].astype(float)
    columns = {"r": tokens.returns, "d": tokens.returns - tokens.values}
    columns["m"] = tokens.returns - mean[tokens.row]
    found = {"of_both_n": has_both}
    for name, x in columns.items():
        found |= {f"of_both_{name}": x * has_both, f"of_both_{name * 2}": x * x * has_both}
    return {name: tokens.by_group(x) for name, x in found.items()}


def _siblings_ahead(s: Sums) -> Any:
    n = s["of_both_n"]
    of_r, of_d, of_m = (
        s[f"of_both_{x * 2}"] / n - (s[f"of_both_{x}"] / n) ** 2 for x in ("r", "d", "m")
    )
    return (of_d - of_m) / np.where(of_r > 1e-9, of_r, np.nan)


def _length_sums(tokens: Tokens) -> dict[str, np.ndarray]:
    """What cells of equal position and response length leave of V, R and their difference.

    A cell's mean is that of the other groups' tokens in it, else of all of theirs: its own would
    explain the more, the fewer groups there are.
    """
    lengths = even_bins(tokens.lengths, most=min(8, max(1, tokens.num_groups // _GROUPS_IN_BIN)))
    places = even_bins(tokens.position, most=32)
    cell = lengths[tokens.row] * (int(places.max()) + 1) + places
    own = np.unique(cell * tokens.num_groups + tokens.group, return_inverse=True)[1]

    def others(x: np.ndarray) -> np.ndarray:
        return np.bincount(cell, weights=x)[cell] - np.bincount(own, weights=x)[own]

    n = others(np.ones_like(tokens.values))

    def left(x: np.ndarray) -> np.ndarray:
        return x - np.where(n > 0, others(x) / np.maximum(n, 1), x.mean())

    v, r = left(tokens.values), left(tokens.returns)
    found = {"left_vv": v * v, "left_rr": r * r, "left_dd": (v - r) ** 2}
    return {name: tokens.by_group(x) for name, x in found.items()}


def even_bins(x: np.ndarray, *, most: int) -> np.ndarray:
    """The number of each entry's bin: at most `most` bins of about as many entries; equal ones
    share a bin."""
    edges = np.unique(np.quantile(x, np.linspace(0, 1, most + 1)[1:-1])) if most > 1 else x[:0]
    return np.searchsorted(edges, x, side="left")


def _row_sums(tokens: Tokens) -> dict[str, np.ndarray]:
    """Of responses: length, mean value and reward."""
    num = np.maximum(np.bincount(tokens.row, minlength=len(tokens.rewards)), 1)
    mean = np.bincount(tokens.row, weights=tokens.values, minlength=len(num)) / num
    length, reward = tokens.lengths.astype(float), tokens.rewards
    columns = {
        "rows": np.ones_like(mean),
        "length": length,
        "length_2": length**2,
        "mean": mean,
        "mean_2": mean**2,
        "mean_length": mean * length,
        "reward": reward,
        "reward_2": reward**2,
        "reward_length": reward * length,
    }
    groups = tokens.row_groups
    return {
        name: np.bincount(groups, weights=x, minlength=tokens.num_groups)
        for name, x in columns.items()
    }


def _var(s: Sums, name: str) -> Any:
    return s[name * 2] / s["n"] - (s[name] / s["n"]) ** 2


def _cov(s: Sums) -> Any:
    return s["vr"] / s["n"] - s["v"] * s["r"] / s["n"] ** 2


def _slope(s: Sums) -> Any:
    least = _TINY * (s["vv"] / s["n"])
    variance = _var(s, "v")
    return _cov(s) / np.where(variance > least, variance, np.nan)


def _between(s: Sums) -> Any:
    def variance(name: str) -> Any:
        return s[name * 2] / s["prompts"] - (s[name] / s["prompts"]) ** 2

    worth = variance("m")
    return 1 - variance("e") / np.where(worth > 1e-9, worth, np.nan)


def _row_correlation(s: Sums, name: str) -> Any:
    n = s["rows"]
    covariance = s[f"{name}_length"] / n - s[name] * s["length"] / n**2
    own, length = (s[f"{x}_2"] / n - (s[x] / n) ** 2 for x in (name, "length"))
    return covariance / np.sqrt(np.where((own > 1e-12) & (length > 0), own * length, np.nan))
