"""VAPO's loss without a critic, as an estimator of one's own: the baseline is a mean of rewards.

The value of every token of a response is the mean reward of the prompt's other responses, or of
the batch's others where a prompt has one response. With `alpha` null the advantage is the reward
less that mean, on every token. With a number lambda is by length, as VAPO's: of the reward's
surprise, lambda^(T-t) reaches token t. With `whole_batch` the mean is of the batch's others, even
if prompts have several responses.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from vapo.advantages.estimators import Estimate
from vapo.config import Hyperparameters
from vapo.functional.advantages import gae, length_adaptive_lambda
from vapo.types import EvaluatedBatch


def others_mean(rewards: Float[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """The mean reward of each response's others: of its group, or of the batch without groups.

    >>> others_mean(torch.tensor([1.0, -1.0, 1.0, 1.0]), 2)
    tensor([-1.,  1.,  1.,  1.])
    >>> others_mean(torch.tensor([1.0, -1.0, -1.0]), 1)
    tensor([-1.,  0.,  0.])
    """
    groups = rewards[None] if group_size == 1 else rewards.view(-1, group_size)
    return ((groups.sum(dim=1, keepdim=True) - groups) / (groups.shape[1] - 1)).flatten()


def estimate(
    batch: EvaluatedBatch,
    token_rewards: Float[Tensor, "B T"],
    hyperparameters: Hyperparameters,
    *,
    alpha: float | None,
    whole_batch: bool = False,
) -> Estimate:
    """The advantages beside a mean of rewards; `alpha` null: lambda 1."""
    mask = batch.response_mask
    group_size = 1 if whole_batch else batch.group_size
    values = others_mean(token_rewards.sum(dim=1), group_size)[:, None] * mask
    lambda_ = 1.0 if alpha is None else length_adaptive_lambda(mask.sum(dim=1), alpha=alpha)
    columns = (token_rewards, values, mask)
    return Estimate(gae(*columns, gamma=hyperparameters.gamma, lambda_=lambda_))
