"""Advantages from a kernel on the actor's hidden states, as an estimator of one's own.

    vapo sweep --config conf/vapo.yaml --grid experiments/critics/for_nothing.yaml

The value of a state is the mean return of other responses, weighted by how similar their hidden
states are. It is our own reading of Hista (arXiv 2605.29782), of whose paper we could read no more
than the abstract. Nothing is trained for it, and no value of a response is made of its own return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vapo.advantages.estimators import Estimate
from vapo.config import Hyperparameters
from vapo.functional.advantages import gae, length_adaptive_lambda
from vapo.types import EvaluatedBatch

By = Literal["states", "responses"]


def kernel_values(
    states: Sequence[Tensor],
    returns: Tensor,
    *,
    temperatures: Sequence[float],
    by: By,
    groups: Sequence[object] | None = None,
) -> dict[float, list[Tensor]]:
    """By temperature, of each response: V = sum w_j R_j / sum w_j, w = exp(cosine / temperature).

    j are the states of the other responses (`by` states), or the other responses, each by its most
    similar state (responses).

    Args:
        states: of each response [tokens, H], before each of its tokens, their mean taken away.
        returns: of each response [B].
        groups: of each response; it is compared with those of its own group. None: with all.

    >>> one, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> states, returns = [one, one, other], torch.tensor([5.0, 1.0, 0.0])
    >>> # exp(1 / 0.5) = 7.39 for the same state, exp(0) = 1 for the one across: 7.39 / 15.78
    >>> round(float(kernel_values(states, returns, temperatures=[0.5], by="states")[0.5][0]), 4)
    0.4683
    >>> round(float(kernel_values(states, returns, temperatures=[0.5], by="responses")[0.5][0]), 4)
    0.5
    """
    everyone = normalize(torch.cat(list(states)), dim=1)
    parts = everyone.split([len(row_states) for row_states in states])
    values_by_temperature: dict[float, list[Tensor]] = {
        temperature: [] for temperature in temperatures
    }
    for index, row_states_normalized in enumerate(parts):
        other_rows = [
            i
            for i in range(len(states))
            if i != index and (groups is None or groups[i] == groups[index])
        ]
        similar = row_states_normalized @ torch.cat([parts[i] for i in other_rows]).T
        lengths = [len(parts[i]) for i in other_rows]
        if by == "responses":
            best_similarities = [part.amax(dim=1) for part in similar.split(lengths, dim=1)]
            similar, lengths = torch.stack(best_similarities, dim=1), [1] * len(other_rows)
        earned = returns[other_rows].to(similar.dtype).repeat_interleave(torch.tensor(lengths))
        for temperature, values in values_by_temperature.items():
            values.append((similar / temperature).softmax(dim=1) @ earned)
    return values_by_temperature


def estimate(
    batch: EvaluatedBatch,
    token_rewards: Tensor,
    hyperparameters: Hyperparameters,
    *,
    temperature: float,
    by: By,
    alpha: float | None,
) -> Estimate:
    """GAE with these values, and with VAPO's lambda by length, or lambda 1 where alpha is None.

    The responses that are compared are all of this process's; one layer is read.
    """
    assert batch.actor_states is not None
    states = [row_states[:, 0].float() for row_states in batch.actor_states]
    center = torch.cat(states).mean(dim=0)
    by_temperature = kernel_values(
        [row_states - center for row_states in states],
        token_rewards.sum(dim=1),
        temperatures=[temperature],
        by=by,
    )
    values = torch.zeros_like(token_rewards)
    for row, row_values in enumerate(by_temperature[temperature]):
        values[row, batch.response_mask[row]] = row_values.to(values.dtype)
    lengths = batch.response_mask.sum(dim=1)
    lambda_ = 1.0 if alpha is None else length_adaptive_lambda(lengths, alpha=alpha)
    columns = (token_rewards, values, batch.response_mask)
    return Estimate(gae(*columns, gamma=hyperparameters.gamma, lambda_=lambda_))
