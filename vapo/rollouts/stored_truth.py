"""The measured prefixes of stored rollouts, as columns of a batch for its value targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vapo.config import FitConfig
from vapo.config.critic_rules import critic_is_punished
from vapo.errors import UserError
from vapo.rollouts.rollout_rows import StoredRollout
from vapo.types import RolloutBatch

_TARGETS = "components.value_pretraining.targets"


def returns_settings(config: FitConfig) -> dict[str, Any]:
    """What the return of a continuation depends on, beside its verdict.

    `punished`: the budget and the ramp of the overlong punishment, where the critic's reward has
    it.
    """
    overlong, most = config.rewards.overlong, config.rollouts.max_response_tokens
    punished = [most, overlong.ramp_tokens(most)] if critic_is_punished(config) else None
    return {"gamma": config.algorithm.gamma, "punished": punished}


def check_truth(
    config: FitConfig, rows: Sequence[StoredRollout], metadata: Mapping[str, Any], path: Path
) -> None:
    """Nothing where value targets are the responses' own returns.

    Raises: UserError: the file has no measured prefixes, or their returns are of other settings.
    """
    if config.components.value_pretraining.targets != "truth":
        return
    if not any(row.truth for row in rows):
        raise UserError(
            f"{_TARGETS} truth: {path} has no continuations (its columns truth_tokens and "
            "truth_values are absent or empty): sample them with `vapo rollouts --value_truth 4`, "
            f"or set {_TARGETS}=returns"
        )
    written, own = metadata.get("value_truth") or {}, returns_settings(config)
    if "gamma" in written and written["gamma"] != own["gamma"]:
        raise UserError(
            f"{_TARGETS} truth: the returns of {path} are discounted with gamma "
            f"{written['gamma']:g}, and algorithm.gamma is {own['gamma']:g}: set it to the "
            f"file's, or {_TARGETS}=returns"
        )
    if "punished" in written and written["punished"] != own["punished"]:
        raise UserError(
            f"{_TARGETS} truth: the returns of {path} are of responses with "
            f"{_punishment(written['punished'])}, and the config has "
            f"{_punishment(own['punished'])}: set rewards.overlong, critic.reward and "
            f"rollouts.max_response_tokens as they were, or {_TARGETS}=returns"
        )


def _punishment(punished: Sequence[int] | None) -> str:
    if punished is None:
        return "no overlong punishment"
    return f"an overlong punishment over the last {punished[1]} of {punished[0]} tokens"


def with_truth(batch: RolloutBatch, rows: Sequence[StoredRollout]) -> RolloutBatch:
    """The batch with the mean return of each row's continuations, and how many count for it."""
    values, draws = (torch.zeros(batch.response_mask.shape) for _ in range(2))
    for number, row in enumerate(rows):
        for prefix in row.truth:
            values[number, prefix.num_tokens] = prefix.value
            draws[number, prefix.num_tokens] = prefix.num_draws
    return replace(batch, measured_values=values, measured_draws=draws)
