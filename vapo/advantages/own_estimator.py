"""An advantage estimator of the user's own, imported by the path in the config."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.advantages.contract import Estimate, Estimator, check_estimate
from vapo.config import Hyperparameters
from vapo.config.algorithm import OwnEstimatorOptions
from vapo.config.schema import AlgorithmConfig
from vapo.errors import UserError
from vapo.functional.masking import zero_outside
from vapo.rollouts.bad_rows import bad_inputs
from vapo.system.user_functions import check_arguments, import_function, raised_in
from vapo.types import EvaluatedBatch

_KEY = "algorithm.estimator_function"


def own_estimator(algorithm: AlgorithmConfig) -> Estimator:
    """The user's function, held to the contract; what it says beside the responses is dropped.

    A batch with numbers that are not finite is not trained on, so the function may pass them on.

    Raises:
        UserError: it cannot be imported or called; in a call: it raises or breaks the contract.
    """
    assert isinstance(algorithm, OwnEstimatorOptions)
    function = import_function(algorithm.estimator_function, key=_KEY)
    name = f"{_KEY} {algorithm.estimator_function}"
    check_arguments(function, name, "batch", "token_rewards", "hyperparameters")

    def estimate(
        batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
    ) -> Estimate:
        try:
            with torch.no_grad():
                result = function(batch, token_rewards.clone(), hyperparameters)
        except Exception as error:  # a user's function may raise anything
            raise UserError(f"{name} {raised_in(function, error)}") from error
        check_estimate(
            result,
            batch,
            token_rewards,
            trains_critic=algorithm.has_critic,
            is_finite=not any(bool(rows.any()) for rows in bad_inputs(batch).values()),
            name=name,
        )
        targets = result.value_targets
        return Estimate(
            zero_outside(result.advantages.detach(), batch.response_mask),
            None if targets is None else zero_outside(targets.detach(), batch.response_mask),
            result.kept,
        )

    return estimate
