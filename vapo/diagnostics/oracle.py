"""The explained variance of an oracle: the best that a critic could reach on given rollouts.

An oracle knows the hidden state before each token. Its value of a state is the mean return there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from vapo.advantages.credit import achieved_returns, critic_rewards, value_token_mask
from vapo.config import FitConfig, resolve
from vapo.errors import UserError
from vapo.functional.columns import placed_rewards
from vapo.functional.metrics import explained_variance
from vapo.prompts.generators import (
    call_beside_generator,
    functions_beside_generators,
    name_of,
)
from vapo.rollouts.engines.contract import ids_before_end, sampled_text
from vapo.rollouts.rollout_rows import StoredRollout
from vapo.rollouts.stored_rollouts import RolloutDataset
from vapo.types import FinishReason, Rollout, RolloutBatch


def oracle_of(
    config: FitConfig, tokenizer: PreTrainedTokenizerBase
) -> Callable[[Rollout], Sequence[str] | None]:
    """Return a function that gives the hidden state before each token of a response.

    It gives None if no `oracle_states` stands beside the generator of the response's prompt, or if
    `states_before_tokens` returns None.
    """
    functions = functions_beside_generators(config.data, "oracle_states")

    def states(rollout: Rollout) -> Sequence[str] | None:
        function = functions.get(rollout.prompt.source)
        return None if function is None else states_before_tokens(function, rollout, tokenizer)

    return states


def states_before_tokens(
    function: Callable[[str, str], Sequence[str] | None],
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase,
) -> Sequence[str] | None:
    """Return the hidden state before each response token.

    None if the prompt is not a problem of the task, or if the texts of the tokens, joined, are not
    the response's text, as in an episode.

    Raises: UserError: the function raises, or does not return a text for each prefix.

    Args:
        function: returns the state of each prefix of a response, from problem and response; None if
            the problem is not one of the task.
        rollout: one response.
        tokenizer: the tokenizer of the policy that sampled the response.
    """
    if not all(rollout.is_sampled):
        return None
    problem, response = str(rollout.prompt.record.get("prompt", "")), rollout.response_text
    states = call_beside_generator(function, problem, response)
    if states is None:
        return None
    if len(states) != len(response) + 1 or not all(isinstance(state, str) for state in states):
        raise UserError(
            f"{name_of(function)} must return a list with a text for each of the "
            f"{len(response) + 1} prefixes of the response {response!r:.80}, the empty one first"
        )
    has_ended = rollout.finish_reason in (FinishReason.STOP, FinishReason.TURNS)
    ids = rollout.response_ids
    spoken = ids_before_end(ids, tokenizer, ids[-1:] if has_ended else ())
    places = list(accumulate((len(sampled_text([i], tokenizer)) for i in spoken), initial=0))
    places += places[-1:] * (len(ids) - len(spoken))
    return None if places[-1] != len(rollout.response_text) else [states[p] for p in places[:-1]]


def oracle_explained_variance(stored: RolloutDataset) -> float | None:
    """Return an oracle's explained variance on held-out rollouts, from a column of the stored file.

    The column `oracle` has values. For `oracle_state` the value of a state is the mean return of
    the training tokens in it and of one token with the mean of all, so that a rare state is near
    that mean. None if neither column is complete.
    """
    values = _at_values(stored, stored.heldout, "oracle")
    if values is None:
        training = _at_values(stored, stored.training, "oracle_state")
        heldout = _at_values(stored, stored.heldout, "oracle_state")
        if training is None or heldout is None:
            return None
        values = state_values(training, _returns(stored, stored.training), heldout)
    return explained_variance_of_values(values, _returns(stored, stored.heldout))


def explained_variance_of_values(
    values: Sequence[Sequence[float]], returns: Sequence[Sequence[float]]
) -> float:
    """Return the explained variance of values against returns, over all tokens.

    Args:
        values, returns: for each response, a number for each token.
    """
    is_token = [torch.ones(len(row), dtype=torch.bool) for row in returns]
    padded_values, padded_returns = (
        pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], batch_first=True)
        for rows in (values, returns)
    )
    mask = pad_sequence(is_token, batch_first=True)
    return float(explained_variance(padded_values, padded_returns, mask))


def _returns(stored: RolloutDataset, units: Sequence[Sequence[StoredRollout]]) -> list[list[float]]:
    return token_returns(stored.batch_of(units), stored.config)


def _at_values(
    stored: RolloutDataset, units: Sequence[Sequence[StoredRollout]], column: str
) -> list[list[Any]] | None:
    """Return a stored column's entries at the tokens at which the critic has a value.

    There is a list for each rollout. The result is None if a rollout lacks the column.
    """
    rows = [getattr(row, column) for unit in units for row in unit]
    if any(row is None for row in rows):
        return None
    places = value_token_mask(stored.batch_of(units), resolve(stored.config)).tolist()
    return [
        [x for x, has_value in zip(row, mask, strict=False) if has_value]  # the mask has padding
        for row, mask in zip(rows, places, strict=True)
    ]


def token_returns(batch: RolloutBatch, config: FitConfig) -> list[list[float]]:
    """Return for each response the Monte-Carlo return of each sampled token.

    The rewards are those of the critic. With GAE over turns there is one return for each turn.
    """
    numbers = resolve(config)
    returns = achieved_returns(batch, placed_rewards(batch, critic_rewards(batch, config)), numbers)
    rows = zip(returns, value_token_mask(batch, numbers), strict=True)
    return [row[places].tolist() for row, places in rows]


def state_values(
    training: Sequence[Sequence[str]],
    returns: Sequence[Sequence[float]],
    heldout: Sequence[Sequence[str]],
) -> list[list[float]]:
    """Return for each held-out token the mean return of the training tokens in its state.

    One token with the mean return of all is added to each state, so that a rare state is near that
    mean. A state without training tokens has exactly that mean.

    Args:
        training, returns: for each training response, the state before each token and its return.
        heldout: for each held-out response, the state before each token.
    """
    everything = [value for row in returns for value in row]
    mean = sum(everything) / len(everything)
    sums: dict[str, tuple[float, int]] = {}
    for states, row_returns in zip(training, returns, strict=True):
        for state, value in zip(states, row_returns, strict=True):
            total, count = sums.get(state, (mean, 1))
            sums[state] = total + value, count + 1
    table = {state: total / count for state, (total, count) in sums.items()}
    return [[table.get(state, mean) for state in states] for states in heldout]
