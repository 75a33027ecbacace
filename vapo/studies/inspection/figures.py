"""Figures that compare a critic's values with the returns, with intervals over prompts.

Every figure is a function of sums over groups (the responses to one prompt of one step), so its
interval is a bootstrap over groups. A token's return is the discounted sum of the rewards from this
token on. If only the last token has a reward, it is that reward, discounted. The critic should
predict the return, whatever lambda it was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vapo.intervals import Bootstrap, Figure, Sums
from vapo.studies.inspection.group_sample import Tokens

OUTSIDE_BY = 0.25  # of the returns' range: values beyond it belong to no sound critic
_MAX_UNITS = 2000  # units that the bootstrap draws; more groups than these are put into bags
_GROUPS_IN_BIN = 8  # groups for each bin of response lengths, at least
_TINY = 1e-12  # share of the mean square: float arithmetic may leave this of a variance of 0


def bootstrap_over_groups(
    table: Mapping[str, np.ndarray], *, seed: int, num_resamples: int
) -> Bootstrap:
    """Return a bootstrap over groups. Above 2000 groups, it draws random bags of groups instead.

    Args:
        table: name -> an array with a number for each group.
    """
    draw = np.random.default_rng(seed)
    num_groups = len(next(iter(table.values())))
    if num_groups > _MAX_UNITS:
        bags = draw.permutation(num_groups) % _MAX_UNITS
        table = {k: np.bincount(bags, weights=x, minlength=_MAX_UNITS) for k, x in table.items()}
    return Bootstrap(table, min(num_groups, _MAX_UNITS), draw, num_resamples)


@dataclass(frozen=True)
class CriticFigures:
    """A critic's figures: its values V against the returns R, over all tokens if nothing is said.

    explained                  1 - Var(R - V) / Var(R)
    explained_unshifted        1 - E[(R - V)^2] / Var(R); a constant shift counts as an error
    bias                       E[V - R]
    slope, intercept           of the line that predicts R from V; 1 and 0 if V is calibrated
    correlation                of V and R
    spread                     sd(V) / sd(R)
    outside                    the share of tokens whose value cannot be a return
    explained_between          how much of the differences between prompts' mean returns the values
                               before the first token explain, corrected for few responses
    explained_within           how much of the differences within groups V explains
    start_correlation          correlation, within groups, of the value before the first token and
                               R: 0 if the value knows the prompt alone, as it must
    value_between              the share of V's variance that lies between groups
    siblings_ahead             how much more of R the mean reward of the other responses explains
                               than V does, over the tokens that have both
    gradient_noise_ratio       the noise that R - V brings into the policy's gradient, divided by
                               that of R less the mean reward of the other responses; over the
                               tokens that have both, and log-probs
    by_length                  the share of V's variance that position and response length explain,
                               as estimated on other groups
    return_by_length           the share of R's variance that position and response length explain
    explained_beyond_length    `explained` for the parts of V and R that position and length do not
                               explain
    length_correlation         correlation of a response's mean value with its length
    reward_length_correlation  correlation of a response's reward with its length
    later_share                the share of tokens that are not the first of their response
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
    start_correlation: Figure
    value_between: Figure
    siblings_ahead: Figure
    gradient_noise_ratio: Figure
    by_length: Figure
    return_by_length: Figure
    explained_beyond_length: Figure
    length_correlation: Figure
    reward_length_correlation: Figure


def critic_figures(tokens: Tokens, *, seed: int, num_resamples: int = 500) -> CriticFigures | None:
    """Compute all figures of a critic from its tokens' values and returns; None without tokens.

    Args:
        seed: for the bootstrap and its intervals.
    """
    if not len(tokens.values):
        return None
    v, r = tokens.values, tokens.returns
    sums = _token_sums(tokens) | _group_sums(tokens) | _length_sums(tokens) | _row_sums(tokens)
    sums |= _sibling_sums(tokens) | _noise_sums(tokens)
    figure = bootstrap_over_groups(sums, seed=seed, num_resamples=num_resamples).figure
    rounding = _TINY * float(np.square(r).max() or 1.0)

    def nonzero(variance: Any) -> Any:
        """Return the variance, or NaN where it is so small that it may be a rounding error."""
        return np.where(variance > rounding, variance, np.nan)

    return CriticFigures(
        num_groups=int((tokens.by_group(np.ones_like(v)) > 0).sum()),
        num_responses=len(tokens.rewards),
        num_tokens=len(v),
        value_mean=float(v.mean()),
        value_std=float(v.std()),
        return_mean=float(r.mean()),
        return_std=float(r.std()),
        later_share=float((tokens.position > 0).mean()),
        explained=figure(lambda s: 1 - _var(s, "d") / nonzero(_var(s, "r"))),
        explained_unshifted=figure(lambda s: 1 - s["dd"] / s["n"] / nonzero(_var(s, "r"))),
        bias=figure(lambda s: s["d"] / s["n"]),
        slope=figure(_slope),
        intercept=figure(lambda s: s["r"] / s["n"] - _slope(s) * s["v"] / s["n"]),
        correlation=figure(
            lambda s: _cov(s) / np.sqrt(nonzero(_var(s, "v")) * nonzero(_var(s, "r")))
        ),
        spread=figure(lambda s: np.sqrt(np.maximum(_var(s, "v"), 0.0) / nonzero(_var(s, "r")))),
        outside=figure(lambda s: s["outside"] / s["n"]),
        explained_between=figure(_between),
        explained_within=figure(lambda s: 1 - s["within_d"] / nonzero(s["within_r"])),
        start_correlation=figure(
            lambda s: s["start_vr"] / np.sqrt(nonzero(s["start_vv"]) * nonzero(s["start_rr"]))
        ),
        value_between=figure(lambda s: 1 - s["within_all_v"] / (s["n"] * nonzero(_var(s, "v")))),
        siblings_ahead=figure(_siblings_ahead),
        gradient_noise_ratio=figure(_gradient_noise_ratio),
        by_length=figure(lambda s: 1 - s["residual_vv"] / (s["n"] * nonzero(_var(s, "v")))),
        return_by_length=figure(lambda s: 1 - s["residual_rr"] / (s["n"] * nonzero(_var(s, "r")))),
        explained_beyond_length=figure(lambda s: 1 - s["residual_dd"] / nonzero(s["residual_rr"])),
        length_correlation=figure(lambda s: _row_correlation(s, "mean")),
        reward_length_correlation=figure(lambda s: _row_correlation(s, "reward")),
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
    """Return sums for each group, from which the figures between and within groups are computed.

    Figures between groups compare the values before the first token. Groups with one response count
    as 0, except in `within_all_v`.
    """
    v, r, num = tokens.values, tokens.returns, tokens.num_groups
    n = np.maximum(tokens.by_group(np.ones_like(v)), 1)

    def within(x: np.ndarray) -> np.ndarray:
        mean = tokens.by_group(x) / n
        return tokens.by_group((x - mean[tokens.group]) ** 2)

    size = np.bincount(tokens.row_groups, minlength=num).astype(float)
    several = size >= 2
    is_first = tokens.position == 0
    row_group, rows = tokens.group[is_first], tokens.row[is_first]
    start = np.bincount(row_group, minlength=num).astype(float)
    counts = np.maximum(start, 1)
    reward = np.bincount(row_group, weights=r[is_first], minlength=num) / counts
    value = np.bincount(row_group, weights=v[is_first], minlength=num) / counts
    apart = {"r": r[is_first] - reward[row_group], "v": v[is_first] - value[row_group]}
    starts = {
        f"start_{a}{b}": np.bincount(row_group, weights=apart[a] * apart[b], minlength=num)
        for a, b in ("vr", "vv", "rr")
    }
    noise = starts["start_rr"] / np.maximum(start - 1, 1) / counts
    counts_between = ((start >= 2) & several).astype(float)
    assert len(rows) == len(row_group)
    between = {"prompts": np.ones(num), "m": reward, "mm": reward**2 - noise}
    between |= {"e": reward - value, "ee": (reward - value) ** 2 - noise}
    columns = {name: np.where(counts_between > 0, x, 0.0) for name, x in between.items()}
    inside = {"within_r": within(r), "within_d": within(v - r), "within_v": within(v)}
    columns |= {name: np.where(several, x, 0.0) for name, x in (inside | starts).items()}
    return columns | {"within_all_v": within(v)}


def _sibling_sums(tokens: Tokens) -> dict[str, np.ndarray]:
    """Return for each group the sums and sums of squares that `_siblings_ahead` compares.

    The columns are R, R - V, and R less the mean reward of the group's other responses. Groups with
    one response count as 0.
    """
    mean, has_siblings = _siblings_mean(tokens)
    has_both = has_siblings.astype(float)
    columns = {"r": tokens.returns, "d": tokens.returns - tokens.values}
    columns["m"] = tokens.returns - mean
    sums = {"of_both_n": has_both}
    for name, x in columns.items():
        sums |= {f"of_both_{name}": x * has_both, f"of_both_{name * 2}": x * x * has_both}
    return {name: tokens.by_group(x) for name, x in sums.items()}


def _siblings_mean(tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """For each token the mean reward of its response's siblings, and whether it has any."""
    size = np.bincount(tokens.row_groups, minlength=tokens.num_groups)
    total = np.bincount(tokens.row_groups, weights=tokens.rewards, minlength=tokens.num_groups)
    num_siblings = np.maximum(size - 1, 1)[tokens.row_groups]
    mean = (total[tokens.row_groups] - tokens.rewards) / num_siblings
    return mean[tokens.row], (size >= 2)[tokens.group]


def _noise_sums(tokens: Tokens) -> dict[str, np.ndarray]:
    """Sums of R - V and of R less the siblings' mean, and those weighted by the squared gradient.

    The weight is (1 - p)^2, p the probability with which the token was sampled: the square of the
    gradient of log p at the token's logit.
    """
    mean, has_siblings = _siblings_mean(tokens)
    has_all = has_siblings & np.isfinite(tokens.logprobs)
    weight = np.square(1 - np.exp(np.where(has_all, np.minimum(tokens.logprobs, 0.0), 0.0)))
    sums = {"noise_n": has_all.astype(float), "noise_w": weight}
    against = {"d": tokens.returns - tokens.values, "m": tokens.returns - mean}
    for name, x in against.items():
        sums |= {f"noise_{name}": x * has_all, f"noise_w{name}": weight * x}
        sums[f"noise_w{name * 2}"] = weight * x * x
    return {name: tokens.by_group(x) for name, x in sums.items()}


def _gradient_noise_ratio(s: Sums) -> Any:
    """Compute what `vapo.functional.metrics.gradient_noise_ratio` does, from sums over groups."""

    def noise(name: str) -> Any:
        mean = s[f"noise_{name}"] / s["noise_n"]
        weighted, squares = s[f"noise_w{name}"], s[f"noise_w{name * 2}"]
        return squares - 2 * mean * weighted + mean**2 * s["noise_w"]

    baseline = noise("m")
    return noise("d") / np.where(baseline > 1e-9, baseline, np.nan)


def _siblings_ahead(s: Sums) -> Any:
    n = s["of_both_n"]
    of_r, of_d, of_m = (
        s[f"of_both_{x * 2}"] / n - (s[f"of_both_{x}"] / n) ** 2 for x in ("r", "d", "m")
    )
    return (of_d - of_m) / np.where(of_r > 1e-9, of_r, np.nan)


def _length_sums(tokens: Tokens) -> dict[str, np.ndarray]:
    """Return for each group the sums of squares that position and length leave unexplained.

    They are the squared residuals of V, of R and of V - R. Tokens of about equal position and
    response length share a bin. A token's residual is its number less the mean over the other
    groups' tokens in its bin, or less the mean of all tokens if no other group is in the bin. The
    token's own group is left out, because a mean with it would explain the more, the fewer groups
    there are.
    """
    max_bins = min(8, max(1, tokens.num_groups // _GROUPS_IN_BIN))
    lengths = even_bins(tokens.lengths, max_bins=max_bins)
    places = even_bins(tokens.position, max_bins=32)
    bins = lengths[tokens.row] * (int(places.max()) + 1) + places
    group_bin = np.unique(bins * tokens.num_groups + tokens.group, return_inverse=True)[1]

    def sum_over_others(x: np.ndarray) -> np.ndarray:
        own_group = np.bincount(group_bin, weights=x)[group_bin]
        return np.bincount(bins, weights=x)[bins] - own_group

    n = sum_over_others(np.ones_like(tokens.values))

    def residual(x: np.ndarray) -> np.ndarray:
        return x - np.where(n > 0, sum_over_others(x) / np.maximum(n, 1), x.mean())

    v, r = residual(tokens.values), residual(tokens.returns)
    columns = {"residual_vv": v * v, "residual_rr": r * r, "residual_dd": (v - r) ** 2}
    return {name: tokens.by_group(x) for name, x in columns.items()}


def even_bins(x: np.ndarray, *, max_bins: int) -> np.ndarray:
    """Return the bin number of each entry. At most `max_bins` bins have about equally many entries.

    Equal entries share a bin.
    """
    inner = np.linspace(0, 1, max_bins + 1)[1:-1]
    edges = np.unique(np.quantile(x, inner)) if max_bins > 1 else x[:0]
    return np.searchsorted(edges, x, side="left")


def _row_sums(tokens: Tokens) -> dict[str, np.ndarray]:
    """Return for each group the sums of its responses' length, mean value and reward.

    Sums of their squares, and of their products with the length, are added.
    """
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
    rounding = _TINY * (s["vv"] / s["n"])
    variance = _var(s, "v")
    return _cov(s) / np.where(variance > rounding, variance, np.nan)


def _between(s: Sums) -> Any:
    def variance(name: str) -> Any:
        return s[name * 2] / s["prompts"] - (s[name] / s["prompts"]) ** 2

    total = variance("m")
    return 1 - variance("e") / np.where(total > 1e-9, total, np.nan)


def _row_correlation(s: Sums, name: str) -> Any:
    n = s["rows"]
    covariance = s[f"{name}_length"] / n - s[name] * s["length"] / n**2
    squares, length = (s[f"{x}_2"] / n - (s[x] / n) ** 2 for x in (name, "length"))
    return covariance / np.sqrt(
        np.where((squares > 1e-12) & (length > 0), squares * length, np.nan)
    )
