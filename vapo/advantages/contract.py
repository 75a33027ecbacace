"""The contract of advantage estimators, and the check that a user's function fulfils it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vapo.config import Hyperparameters
from vapo.config.estimators import OwnEstimatorOptions
from vapo.config.schema import AlgorithmConfig
from vapo.errors import UserError
from vapo.functional.columns import bad_inputs
from vapo.functional.masking import zero_outside
from vapo.types import EvaluatedBatch
from vapo.user_code.user_functions import check_arguments, import_function, raised_in

_KEY = "algorithm.estimator_function"


class Estimate(NamedTuple):
    """What an advantage estimator returns, shipped or a user's.

    `value_targets` are None if no critic is trained. Rows that are not `kept` carry no loss; None:
    all rows are kept. An estimator must take a response's reward as the sum of its token rewards,
    because the KL penalty may be among them.
    """

    advantages: Float[Tensor, "B T"]
    value_targets: Float[Tensor, "B T"] | None = None
    kept: Bool[Tensor, " B"] | None = None


# batch, token rewards [B, T], hyperparameters
Estimator = Callable[[EvaluatedBatch, Float[Tensor, "B T"], Hyperparameters], Estimate]


def user_estimator(algorithm: AlgorithmConfig) -> Estimator:
    """Return an estimator that calls the user's function and checks what it returns.

    Numbers outside of the sampled tokens are set to 0. If the batch has numbers that are not
    finite, the result may have such, too, because the batch is then not trained on.

    Raises:
        UserError: the function cannot be imported or does not take the arguments. Later, in a
            call: the function raises, or its result is not a valid `Estimate` (`check_estimate`).
    """
    assert isinstance(algorithm, OwnEstimatorOptions)
    function = import_function(
        algorithm.estimator_function, key=_KEY, folder=algorithm.estimator_function_folder
    )
    name = f"{_KEY} {algorithm.estimator_function}"
    args = algorithm.estimator_args
    check_arguments(function, name, "batch", "token_rewards", "hyperparameters", **args)

    def estimate(
        batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
    ) -> Estimate:
        try:
            with torch.no_grad():
                result = function(batch, token_rewards.clone(), hyperparameters, **args)
        except Exception as error:  # a user's function may raise anything
            raise UserError(f"{name} {raised_in(function, error)}") from error
        check_estimate(result, batch, token_rewards, trains_critic=algorithm.has_critic, name=name)
        targets = result.value_targets
        return Estimate(
            zero_outside(result.advantages.detach(), batch.response_mask),
            None if targets is None else zero_outside(targets.detach(), batch.response_mask),
            result.kept,
        )

    return estimate


def check_estimate(
    estimate: Any, batch: EvaluatedBatch, token_rewards: Tensor, *, trains_critic: bool, name: str
) -> None:
    """Check that an estimator's result is an `Estimate` with tensors that can be trained on.

    It must have value targets exactly if they train a critic. Its tensors must have the right
    shapes, dtypes and device, and finite numbers if the batch's are finite. `name` is the config
    key with the estimator's name, for the error.

    Raises: UserError: the result is wrong; the error says in what.
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
            f"{name} returned value_targets, but this run trains no critic: leave them out, or set "
            "algorithm.estimator_uses_critic=true"
        )
    is_finite = not any(bool(rows.any()) for rows in bad_inputs(batch).values())
    for column, tensor in estimate._asdict().items():
        if tensor is None and column != "advantages":
            continue
        like = batch.is_correct if column == "kept" else token_rewards
        _check_tensor(tensor, like, f"{name}: {column}")
        if is_finite and column != "kept":
            _check_finite(tensor, batch, f"{name}: {column}")


def _check_tensor(tensor: Any, like: Tensor, name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise UserError(f"{name} are {type(tensor).__name__}, not a tensor")
    for aspect in ("shape", "dtype", "device"):
        expected, actual = getattr(like, aspect), getattr(tensor, aspect)
        if expected != actual:
            texts = [list(x) if aspect == "shape" else x for x in (actual, expected)]
            raise UserError(f"{name} have the {aspect} {texts[0]}, but need {texts[1]}")


def _check_finite(numbers: Tensor, batch: EvaluatedBatch, name: str) -> None:
    is_bad = ~torch.isfinite(numbers) & batch.response_mask
    if bool(is_bad.any()):
        row, column = is_bad.nonzero()[0].tolist()
        prompt = batch.rollouts[row].prompt.prompt_id
        raise UserError(
            f"{name} are not finite at {int(is_bad.sum())} of "
            f"{int(batch.response_mask.sum())} response tokens; the first is "
            f"{float(numbers[row, column])} at token {column} of response {row} (prompt {prompt})"
        )
