"""How much trust a critic has earned, and the values and the lambda that follow from it.

A critic's values stand beside the mean reward B of the other responses to the prompt. Earlier
rollouts say by least squares how far each predicts a response's reward R, and later rollouts use
that mixture. Nothing here is differentiated.

    y       = R - B                     what the others' mean leaves of the reward
    first   = V(s_1) - B                what the critic adds before the first token
    within  = V(s_t) + r_<t - V(s_1)    how its prediction has changed; r_<t: rewards so far
    y       ~ a * first + w * within + c * B      least squares over tokens; a, w in [0, 1]

The final surprise is the part of the reward that the mixture U does not predict before the
response's last token. It reaches every token of the response, however short the lambda, because no
value says which token it belongs to.

Source: this repository (docs/trusted_critic.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vapo.functional.masking import Reduce, first_column, identity, last_column, zero_outside
from vapo.functional.regression import inverse_without_collinear, two_weights_from_0_to_1

_LEAST_GROUPS = 3  # fewer prompts give no variance of a weight


class Trust(NamedTuple):
    """How much a critic is trusted. The defaults mean no trust; two weights of 1 mean full trust.

    first: the weight a of the critic's value before the first token, beside the others' mean.
    within: the weight w of the value's change since then.
    first_level, within_level: by how much that value and that change are too high on average, in
    units of reward.
    end: the share of the uncertainty before a response that is gone before its last token.
    """

    first: float = 0.0
    within: float = 0.0
    first_level: float = 0.0
    within_level: float = 0.0
    end: float = 0.0

    @property
    def is_none(self) -> bool:
        """Whether the critic gets no trust: its two weights `first` and `within` are both 0."""
        return self.first == self.within == 0


class Evidence(NamedTuple):
    """What batches have shown about how well a critic predicts rewards; `earned_trust` reads it.

    It has sums over prompts of sixteen numbers, which `_COLUMNS` names, and of their products.
    """

    sums: Float[Tensor, " 16"]
    products: Float[Tensor, "16 16"]


_FEATURES = ("first", "within", "others")
_COLUMNS = (
    *("first_y", "within_y", "others_y"),
    *("first_first", "first_within", "first_others", "within_within", "within_others"),
    *("others_others", "token_errors", "tokens", "first_errors", "responses"),
    *("first_squares", "end_squares", "prompts"),
)


@torch.no_grad()
def trusted_values(
    values: Float[Tensor, "B T"],
    other_mean: Float[Tensor, " B"],
    received: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    trust: Trust,
) -> Float[Tensor, "B T"]:
    """Mix the critic's values with the mean reward of other responses, by the trust in the critic.

        U_t = B + a * (V_1 - B - first_level) + w * (V_t + r_<t - V_1 - within_level) - r_<t

    V_1 is the value before a response's first True token, and B is `other_mean`, the mean reward of
    the other responses. Two weights of 1 without levels give V, bit for bit. Two weights of 0 give
    B - r_<t.

    received: r_<t, the rewards of a response before each token, not discounted.
    Units: those of the reward.
    Padding: may hold anything, and is 0 in the result.

    >>> v = torch.tensor([[0.5, 0.9]])
    >>> none, every = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    >>> trusted_values(v, torch.tensor([0.1]), none, every, trust=Trust(first=0.0, within=0.5))
    tensor([[0.1000, 0.3000]])
    """
    a, w = trust.first, trust.within
    first = _first_values(values, mask)
    per_response = (a - w) * first + (1 - a) * other_mean[:, None]
    per_response = per_response - (a * trust.first_level + w * trust.within_level)
    mixed = w * zero_outside(values, mask) - (1 - w) * zero_outside(received, mask) + per_response
    return zero_outside(mixed, mask)


def trusted_lambda(
    lambda_: float | Float[Tensor, "B 1"], *, trust: Trust
) -> float | Float[Tensor, "B 1"]:
    """Return the policy's lambda, raised towards 1 as far as the critic's changes are not trusted.

        lambda' = 1 - w * (1 - lambda)             w is `trust.within`

    A smaller lambda lets later values stand in for the reward, and without trust they say nothing.

    >>> trusted_lambda(0.5, trust=Trust(within=0.5))
    0.75
    """
    return lambda_ if trust.within == 1 else 1 - trust.within * (1 - lambda_)


@torch.no_grad()
def final_surprise(
    values: Float[Tensor, "B T"],
    rewards: Float[Tensor, " B"],
    received: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
) -> Float[Tensor, " B"]:
    """Return by how much a response's reward exceeds what is expected before its last True token.

    Expected are the rewards received before that token, and the value of the state before it.

    Units: those of the reward. A row without a True token has 0.

    >>> v, mask = torch.tensor([[0.5, 0.9]]), torch.ones(1, 2, dtype=torch.bool)
    >>> final_surprise(v, torch.tensor([1.0]), torch.zeros(1, 2), mask)
    tensor([0.1000])
    """
    last = last_column(mask)[:, None]
    expected = zero_outside(values + received, mask).gather(1, last)[:, 0]
    return torch.where(mask.any(dim=1), rewards - expected, 0.0)


@torch.no_grad()
def batch_evidence(
    values: Float[Tensor, "B T"],
    rewards: Float[Tensor, " B"],
    other_mean: Float[Tensor, " B"],
    received: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    trusted: Float[Tensor, "B T"],
    group_size: int,
    reduce: Reduce = identity,
) -> Evidence:
    """Return the evidence in a batch of how well the critic's values predict its rewards.

    The least squares of `earned_trust` need sums of products of the features and of y = R - B, all
    centered by their means over the True tokens of all ranks. They are summed prompt by prompt,
    because responses to one prompt are not independent.

    rewards: R, the sum of each response's rewards. mask: the tokens whose values count.
    other_mean: B, the mean reward of the other responses to the prompt.
    received: a response's rewards before each token.
    trusted: the mixture by the trust so far (`trusted_values`). Its errors before the first and the
    last token say how much uncertainty is gone at the end.
    Raises: ValueError when group_size does not divide the number of responses.
    """
    first = _first_values(values, mask).double().expand(mask.shape)
    means = other_mean.double()[:, None].expand(mask.shape)
    if group_size == 1:
        # The mean of the batch's others says nothing of the prompt. It differs between responses by
        # their own rewards alone, so that any first value, less this mean, would predict them.
        means = torch.zeros_like(means)
    y = rewards.double()[:, None] - means
    changed = values.double() + received.double()
    columns = [y, first - means, changed - first, means]
    selected = [torch.where(mask, x, 0.0) for x in columns]
    total, *averages = reduce(torch.stack([mask.sum().double(), *(x.sum() for x in selected)]))
    y, *features = (
        torch.where(mask, x - average / total.clamp(min=1), 0.0)
        for x, average in zip(selected, averages, strict=True)
    )
    pairs = [(f, y) for f in features]
    pairs += [(f, g) for i, f in enumerate(features) for g in features[i:]]
    has_tokens = mask.any(dim=1)
    first_errors = torch.where(has_tokens, first[:, 0] - rewards.double(), 0.0)
    errors = torch.where(mask, changed - rewards.double()[:, None], 0.0)
    trusted_errors = (rewards[:, None] - _first_values(trusted, mask))[:, 0].double()
    per_response = [
        *((p * q).sum(dim=1) for p, q in pairs),
        *(errors.sum(dim=1), mask.sum(dim=1).double(), first_errors, has_tokens.double()),
        torch.where(has_tokens, trusted_errors.square(), 0.0),
        final_surprise(trusted, rewards, received, mask).double().square(),
    ]
    prompts = torch.stack(per_response, dim=1).view(-1, group_size, len(per_response)).sum(dim=1)
    is_counted = prompts[:, _COLUMNS.index("responses"), None] > 0
    rows = torch.cat([prompts, is_counted.double()], dim=1)
    sums = reduce(torch.cat([rows.sum(dim=0), (rows.T @ rows).flatten()]))
    size = len(_COLUMNS)
    return Evidence(sums[:size], sums[size:].view(size, size))


def no_evidence() -> Evidence:
    """Return the evidence of a run before its first batch: all sums are 0."""
    size = len(_COLUMNS)
    zeros = torch.zeros(size, size, dtype=torch.double)
    return Evidence(zeros[0].clone(), zeros)


def later_evidence(earlier: Evidence, batch: Evidence, *, decay: float) -> Evidence:
    """Return a batch's evidence plus the earlier evidence, which counts `decay` times as before.

        sums <- decay * sums + sums of the batch;    products <- decay^2 * products + the batch's

    The products are for variances, so they decay by the square.
    """
    return Evidence(
        decay * earlier.sums.to(batch.sums.device) + batch.sums,
        decay**2 * earlier.products.to(batch.products.device) + batch.products,
    )


def earned_trust(evidence: Evidence) -> Trust:
    """Return the trust that the evidence supports: each number is fitted, and shrunk if uncertain.

        first, within: least squares of R - B on V_1 - B, V_t + r_<t - V_1 and B, in [0, 1]
        levels:        the mean over tokens of V_t + r_<t - R, and over responses of V_1 - R
        end:           1 - sum (R - U before the last token)^2 / sum (R - U before the first)^2
        each is then multiplied by max(0, 1 - (its standard error / it)^2)

    R is a response's reward, B the mean reward of the other responses, V_t the critic's value, r_<t
    the rewards received before token t, and U the mixture of `trusted_values`.
    The standard errors take prompts as independent (sandwich), but not the tokens of a prompt. A
    number that is no larger than its standard error becomes 0. Fewer than three prompts earn no
    trust.

    >>> earned_trust(no_evidence())
    Trust(first=0.0, within=0.0, first_level=0.0, within_level=0.0, end=0.0)
    """
    sums = dict(zip(_COLUMNS, evidence.sums.tolist(), strict=True))
    if sums["prompts"] < _LEAST_GROUPS:
        return Trust()
    first, within = _shrunk_weights(sums, evidence)
    first_level = _shrunk_ratio(evidence, "first_errors", "responses")
    level = _shrunk_ratio(evidence, "token_errors", "tokens")
    unknown_share, variance = _ratio(evidence, "end_squares", "first_squares")
    end = max(1 - unknown_share, 0.0)
    return Trust(first, within, first_level, level - first_level, _shrunk(end, variance, end))


def _shrunk_weights(sums: dict[str, float], evidence: Evidence) -> tuple[float, float]:
    """Return `Trust.first` and `Trust.within`: least-squares weights, shrunk by their uncertainty.

    `sums` are the evidence's sums by name. The mean reward of the other responses is a third
    feature, whose fitted weight is not used. A mean of few rewards is noisy, so its best weight is
    below 1. Without that feature any other number, even noise, would seem to predict the
    difference.
    """
    equations = [
        (f"{name}_y", [_product_column(name, other_name) for other_name in _FEATURES])
        for name in _FEATURES
    ]
    matrix = torch.tensor([[sums[x] for x in row] for _, row in equations], dtype=torch.double)
    target = torch.tensor([sums[column] for column, _ in equations], dtype=torch.double)
    inverse = inverse_without_collinear(matrix)
    free = inverse @ target
    scores = torch.zeros(len(equations), len(_COLUMNS), dtype=torch.double)
    # each score is the sum over tokens of y less the fit, times a feature
    for score, (target_column, columns) in zip(scores, equations, strict=True):
        score[_COLUMNS.index(target_column)] = 1.0
        for column, weight in zip(columns, free.tolist(), strict=True):
            score[_COLUMNS.index(column)] -= weight
    meat = scores @ evidence.products.cpu() @ scores.T
    variances = (inverse @ meat @ inverse).diagonal() * _small_sample_factor(sums)
    first, within = two_weights_from_0_to_1(matrix, target)
    return (
        _shrunk(first, float(variances[0]), max(abs(float(free[0])), first)),
        _shrunk(within, float(variances[1]), max(abs(float(free[1])), within)),
    )


def _product_column(feature: str, other_feature: str) -> str:
    """Return the name in `_COLUMNS` of the product of two features."""
    return "_".join(sorted((feature, other_feature), key=_FEATURES.index))


def _shrunk(number: float, variance: float, estimate: float) -> float:
    """Return number * max(0, 1 - variance / estimate^2); 0 unless the estimate is above 0."""
    return number * max(0.0, 1 - variance / estimate**2) if estimate > 0 else 0.0


def _shrunk_ratio(evidence: Evidence, numerator: str, denominator: str) -> float:
    """Return the ratio of two of the evidence's sums, by their names, shrunk by its uncertainty."""
    ratio, variance = _ratio(evidence, numerator, denominator)
    return _shrunk(ratio, variance, abs(ratio))


def _ratio(evidence: Evidence, numerator: str, denominator: str) -> tuple[float, float]:
    """Return the ratio of two of the evidence's sums, by their names, and the ratio's variance.

    The variance is by the delta method. If the denominator is not above 0, the result is (1, 0).
    """
    sums = dict(zip(_COLUMNS, evidence.sums.tolist(), strict=True))
    if sums[denominator] <= 0:
        return 1.0, 0.0
    mean = sums[numerator] / sums[denominator]
    residual = torch.zeros(len(_COLUMNS), dtype=torch.double)
    residual[_COLUMNS.index(numerator)], residual[_COLUMNS.index(denominator)] = 1.0, -mean
    variance = float(residual @ evidence.products.cpu() @ residual) / sums[denominator] ** 2
    return mean, variance * _small_sample_factor(sums)


def _small_sample_factor(sums: dict[str, float]) -> float:
    """Return the factor that corrects a variance over prompts for two fitted numbers."""
    return sums["prompts"] / (sums["prompts"] - 2)


def _first_values(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B 1"]:
    """Return the value before the first True token of each row; 0 where there is none."""
    return zero_outside(values, mask).gather(1, first_column(mask)[:, None])
