"""Features for a critic from the log-probabilities of the tokens that the policy has sampled."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

NUM_LOGPROB_COLUMNS = 10
_LEAST, _SUM, _COUNT = 4.0, 16.0, 3.0  # bounds of the columns of log-probs, and of the count
_LENGTH = 32.0  # in tokens: at this length the column of the length is 1/2
_START = 8.0  # in tokens: at this length the column of the start is 1/e


def logprob_columns(
    logprobs: Float[Tensor, "B T"], is_sampled: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T 10"]:
    """Compute features of the state before each token, from the tokens sampled before it.

    A policy that has just written something wrong often had little confidence in it, which its
    hidden states need not show. Before the token, m is the least log-prob, s the sum of all, c the
    number of those below log 0.5, n the number of all, and t = n / (n + 32):

        exp(m), max(m, -4) / 4, exp(s), max(s, -16) / 16, min(c, 3) / 3, [c > 0],
        t, t exp(m), t exp(s), exp(-n / 8)

    Before the first token m = s = c = n = 0. Each column lies within [-1, 1]. The products let a
    linear function rise along a response that has gone well so far. The last column lets it have
    another value at the start of a response.

    Source: this repository (docs/critic_options.md).
    Units: `logprobs` in nats, of the distribution that was sampled from.
    Padding: a token that was not sampled does not change the features of the tokens after it.

    >>> columns = logprob_columns(torch.tensor([[0.25, 1.0, 0.5]]).log(), torch.ones(1, 3).bool())
    >>> columns[0, :, [0, 2, 4]]  # the least probability, that of all, a third for each below 0.5
    tensor([[1.0000, 1.0000, 0.0000],
            [0.2500, 0.2500, 0.3333],
            [0.2500, 0.2500, 0.3333]])
    """
    sampled = torch.where(is_sampled, logprobs, 0.0)
    least = _shift_right(sampled.cummin(dim=1).values)
    total = _shift_right(sampled.cumsum(dim=1))
    unlikely = _shift_right((sampled < math.log(0.5)).float().cumsum(dim=1))
    number = _shift_right(is_sampled.float().cumsum(dim=1))
    length = number / (number + _LENGTH)
    columns = (
        least.exp(),
        least.clamp(min=-_LEAST) / _LEAST,
        total.exp(),
        total.clamp(min=-_SUM) / _SUM,
        unlikely.clamp(max=_COUNT) / _COUNT,
        (unlikely > 0).float(),
        length,
        length * least.exp(),
        length * total.exp(),
        (-number / _START).exp(),
    )
    return torch.stack(columns, dim=2)


def _shift_right(columns: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Move every number one column to the right, and put 0 in the first column."""
    return torch.nn.functional.pad(columns, (1, -1))
