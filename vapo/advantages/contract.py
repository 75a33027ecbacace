"""What an advantage estimator is given and what it returns: the built-in ones' and a user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vapo.config import Hyperparameters
from vapo.errors import UserError
from vapo.types import EvaluatedBatch


class Estimate(NamedTuple):
    """What an estimator says. Rows that are not `kept` (None: all are) carry no loss.

    A response's reward is the sum of its token rewards: the KL penalty is among them.
    """

    advantages: Float[Tensor, "B T"]
    value_targets: Float[Tensor, "B T"] | None = None
    kept: Bool[Tensor, " B"] | None = None


# batch, token rewards [B, T], hyperparameters
Estimator = Callable[[EvaluatedBatch, Float[Tensor, "B T"], Hyperparameters], Estimate]


def check_estimate(
    estimate: Any,
    batch: EvaluatedBatch,
    token_rewards: Tensor,
    *,
    trains_critic: bool,
    is_finite: bool,
    name: str,
) -> None:
    """Hold an estimator's result to the contract.

    Args:
        trains_critic: whether there must be value targets; else there must be none.
        is_finite: whether the batch's own numbers are, so that those of the result must be.
        name: the key and the estimator, for the message.

    Raises:
        UserError: naming what is wrong.
    """
    if not isinstance(estimate, Estimate):
        raise UserError(
            f"{name} returned {type(estimate).__name__}, not a vapo.advantages.contract.Estimate"
        )
    if trains_critic and estimate.value_targets is None:
        raise UserError(
            f"{name} returned no value_targets, and a critic is trained on them: return "
            "Estimate(advantages, value_targets), or set algorithm.estimator_uses_critic=false"
        )
    if not trains_critic and estimate.value_targets is not None:
        raise UserError(
            f"{name} returned value_targets, and there is no critic to train on them: leave them "
            "out, or set algorithm.estimator_uses_critic=true"
        )
    _check_tensor(estimate.advantages, token_rewards, f"{name}: advantages")
    if estimate.value_targets is not None:
        _check_tensor(estimate.value_targets, token_rewards, f"{name}: value_targets")
    if estimate.kept is not None:
        _check_tensor(estimate.kept, batch.is_correct, f"{name}: kept")
    if not is_finite:
        return
    for column in ("advantages", "value_targets"):
        numbers = getattr(estimate, column)
        if numbers is not None:
            _check_finite(numbers, batch, f"{name}: {column}")


def _check_tensor(tensor: Any, like: Tensor, what: str) -> None:
    if not isinstance(tensor, Tensor):
        raise UserError(f"{what} are {type(tensor).__name__}, not a tensor")
    for aspect, ours, theirs in (
        ("shape", list(like.shape), list(tensor.shape)),
        ("dtype", like.dtype, tensor.dtype),
        ("device", like.device, tensor.device),
    ):
        if ours != theirs:
            raise UserError(f"{what} have the {aspect} {theirs}, and it must be {ours}")


def _check_finite(numbers: Tensor, batch: EvaluatedBatch, what: str) -> None:
    is_bad = ~torch.isfinite(numbers) & batch.response_mask
    if bool(is_bad.any()):
        row, column = is_bad.nonzero()[0].tolist()
        prompt = batch.rollouts[row].prompt.prompt_id
        raise UserError(
            f"{what} are not finite at {int(is_bad.sum())} of "
            f"{int(batch.response_mask.sum())} response tokens; the first is "
            f"{float(numbers[row, column])} at token {column} of response {row} (prompt {prompt})"
        )
