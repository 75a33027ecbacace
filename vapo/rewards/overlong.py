"""DAPO's soft punishment of overlong responses: added to the reward, never to the verdict."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def soft_overlong_punishment(
    lengths: Int[Tensor, " B"] | Sequence[int], *, max_response_tokens: int, cache_tokens: int
) -> Float[Tensor, " B"]:
    """Return what to add to each reward: 0, falling linearly to -1 over the last `cache_tokens`.

        0                                       length <= L_max - L_cache
        ((L_max - L_cache) - length) / L_cache  up to L_max
        -1                                      beyond

    Source: DAPO (2503.14476), equation 13; L_max is `max_response_tokens`, L_cache is
    `cache_tokens`. VAPO does not use it. Units: lengths in tokens, end token included.

    Raises: ValueError: `cache_tokens` is not in [1, max_response_tokens].

    >>> soft_overlong_punishment([10, 80, 90, 100], max_response_tokens=100, cache_tokens=20)
    tensor([-0.0000, -0.0000, -0.5000, -1.0000])
    """
    if not 1 <= cache_tokens <= max_response_tokens:
        raise ValueError(f"cache_tokens {cache_tokens} is not in [1, {max_response_tokens}]")
    over = torch.as_tensor(lengths).float() - (max_response_tokens - cache_tokens)
    return -(over / cache_tokens).clamp(0.0, 1.0)
