"""The bounds of each policy loss that `algorithm.surrogate` may name beside PPO's clip.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from vapo.config.kinds import option


@dataclass
class DisSurrogate:
    """Options of surrogate dis: the band of ratios to the rollout policy.

    A token whose ratio is outside of (1 - low, 1 + high) has no gradient.
    """

    dis_eps_low: float = option(0.3, "the band's lower part (SAO: 0.3 reasoning, 0.8 code)", gt=0)
    dis_eps_high: float = option(5.0, "the band's upper part (SAO: 5 reasoning, 3 code)", gt=0)


@dataclass
class DppoSurrogate:
    dppo_delta: float = option(
        0.2, "largest rise (or fall, of a negative advantage) of a token's probability", gt=0, le=1
    )


@dataclass
class GspoSurrogate:
    """Options of surrogate gspo: the clip bounds of a response's ratio.

    This ratio is a mean over tokens and close to 1, so the bounds are small.
    """

    gspo_eps_low: float = option(
        3e-4, "lower clip bound of a response's ratio (GSPO: 3e-4)", gt=0, lt=1
    )
    gspo_eps_high: float = option(4e-4, "upper clip bound of a response's ratio (GSPO: 4e-4)", gt=0)


@dataclass
class CispoSurrogate:
    """Options of surrogate cispo: the bounds of each token's importance weight.

    No gradient flows through the weight.
    """

    cispo_eps_low: float | None = option(
        None,
        "a token's weight is at least 1 - this; null: it has no lower bound (as in MiniMax-M1)",
        gt=0,
        lt=1,
    )
    cispo_eps_high: float = option(
        4.0,
        "a token's weight is at most 1 + this (MiniMax-M1: tuned, not stated; ScaleRL: at most 5)",
        gt=0,
    )
