"""The contents of a page, copied from a rollout batch while it is in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.advantages.estimators import policy_lambda
from vapo.config import FitConfig, Hyperparameters, resolve
from vapo.diagnostics.position_profiles import Profile, achieved_returns, value_calibration
from vapo.diagnostics.value_page.group_choice import ChosenGroup, choose_groups
from vapo.functional.advantages import gae
from vapo.system.seeding import derive_seed
from vapo.types import Rollout, TrainingBatch, Verdict

Columns = dict[str, Float[Tensor, " n"]]


@dataclass(frozen=True)
class ShownResponse:
    """A row of the batch; `columns` have a number for each of the tokens in `token_ids`."""

    row: int
    rollout: Rollout
    verdict: Verdict
    reward: float
    carries_loss: bool
    lambda_policy: float | None
    token_ids: list[int]
    columns: Columns


@dataclass(frozen=True)
class ShownGroup:
    """Responses to one prompt, all of which number `num_responses`, `num_correct` of them right."""

    index: int
    reason: str
    num_responses: int
    num_correct: int
    responses: list[ShownResponse]


@dataclass(frozen=True)
class PageContents:
    """Groups are this rank's; the profiles are of all rollouts of all ranks."""

    groups: list[ShownGroup]
    positions: Profile
    calibration: Profile
    num_responses: int
    accuracy: float


def page_contents(
    batch: TrainingBatch, config: FitConfig, positions: Profile, iteration: int
) -> PageContents:
    """Choose what to show of a batch that has its advantages. Every rank must call this."""
    hyperparameters, settings = resolve(config), config.value_pages
    columns = token_columns(batch, hyperparameters)
    chosen = choose_groups(
        batch,
        columns.get("value_error"),
        num_groups=settings.num_groups,
        max_responses=settings.max_responses,
        max_tokens=settings.max_tokens,
        seed=derive_seed(config.seed, "value page", iteration),
    )
    lambdas: Tensor | None = None
    if batch.old_values is not None and batch.advantages is not None:
        lambdas = torch.as_tensor(policy_lambda(batch, hyperparameters)).expand(len(batch), 1)
    return PageContents(
        groups=[shown_group(batch, columns, lambdas, group) for group in chosen],
        positions=positions,
        calibration=value_calibration(batch, hyperparameters),
        num_responses=len(batch),
        accuracy=float(batch.is_correct.double().mean()),
    )


def token_columns(
    batch: TrainingBatch, hyperparameters: Hyperparameters
) -> dict[str, Float[Tensor, "B T"]]:
    """Compute the columns that the phase and the system have: name -> a number for each token.

    `td_error` is r_t + gamma V(s_{t+1}) - V(s_t), `value_error` V(s_t) - return,
    `engine_gap` old log-prob - the engine's.
    """
    returns = achieved_returns(batch, hyperparameters.gamma)
    columns: dict[str, Tensor | None] = {
        "value": batch.old_values,
        "value_target": batch.value_targets,
        "advantage": batch.advantages,
        "unwhitened_advantage": (
            None if batch.raw_advantages is batch.advantages else batch.raw_advantages
        ),
        "return": returns,
        "rollout_logprob": batch.rollout_logprobs,
        "logprob": batch.old_logprobs,
        "importance_weight": batch.importance_weights,
    }
    if batch.old_values is not None:
        columns["value_error"] = batch.old_values - returns
        columns["td_error"] = gae(
            batch.token_rewards,
            batch.old_values,
            batch.response_mask,
            gamma=hyperparameters.gamma,
            lambda_=0,
        )
    if batch.ref_logprobs is not None:  # else all but the last are 0
        columns["token_reward"] = batch.token_rewards
    if batch.old_logprobs is not None:
        columns["engine_gap"] = batch.old_logprobs - batch.rollout_logprobs
        columns["entropy"] = batch.old_entropy
    return {name: column for name, column in columns.items() if column is not None}


def shown_group(
    batch: TrainingBatch,
    columns: dict[str, Float[Tensor, "B T"]],
    lambdas: Float[Tensor, "B 1"] | None,
    chosen: ChosenGroup,
) -> ShownGroup:
    first = chosen.index * batch.group_size

    def shown(row: int, num_tokens: int) -> ShownResponse:
        tokens = batch.response_mask[row].nonzero()[:num_tokens, 0]
        return ShownResponse(
            row=row,
            rollout=batch.rollouts[row],
            verdict=batch.verdicts[row],
            reward=float(batch.rewards[row]),
            carries_loss=bool(batch.loss_mask[row].any()),
            lambda_policy=None if lambdas is None else float(lambdas[row]),
            token_ids=batch.response_ids[row, tokens].tolist(),
            columns={name: column[row, tokens].float() for name, column in columns.items()},
        )

    return ShownGroup(
        index=chosen.index,
        reason=chosen.reason,
        num_responses=batch.group_size,
        num_correct=int(batch.is_correct[first : first + batch.group_size].sum()),
        responses=[shown(*pair) for pair in zip(chosen.rows, chosen.num_tokens, strict=True)],
    )
