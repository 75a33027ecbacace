"""The explained variance of an oracle: what a critic could know at best of given rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vapo.advantages.token_rewards import critic_rewards
from vapo.config import resolve
from vapo.functional.advantages import monte_carlo_returns
from vapo.functional.masking import place_at_last_token
from vapo.functional.metrics import explained_variance
from vapo.rollouts.rollout_rows import StoredRollout
from vapo.rollouts.stored_rollouts import StoredRollouts


def oracle_explained_variance(stored: StoredRollouts) -> float | None:
    """The held-out explained variance of the file's `oracle` values, or of its `oracle_state`s.

    The value of a state is the mean return of the training tokens in it, with the mean of all as
    one more token, so that a rare state says little; a state that no training token is in has
    the mean of all. None where a rollout has neither column.
    """
    heldout = [row for unit in stored.heldout for row in unit]
    training = [row for unit in stored.training for row in unit]
    if all(row.oracle is not None for row in heldout):
        values = [list(row.oracle or ()) for row in heldout]
    elif all(row.oracle_state is not None for row in [*heldout, *training]):
        values = _table_values(training, _returns(stored, stored.training), heldout)
    else:
        return None
    returns = _returns(stored, stored.heldout)
    mask = _padded([[1.0] * len(row) for row in returns]) > 0
    return float(explained_variance(_padded(values), _padded(returns), mask))


def _padded(rows: Sequence[Sequence[float]]) -> Tensor:
    """[B, T], 0 beyond each row's end."""
    widest = max(map(len, rows))
    return torch.tensor([[*row, *[0.0] * (widest - len(row))] for row in rows])


def _returns(stored: StoredRollouts, units: Sequence[Sequence[StoredRollout]]) -> list[list[float]]:
    """The Monte-Carlo return of each response token, of the critic's rewards."""
    batch = stored.batch_of(units)
    rewards = place_at_last_token(critic_rewards(batch, stored.config), batch.response_mask)
    gamma = resolve(stored.config).gamma
    returns: Tensor = monte_carlo_returns(rewards, batch.response_mask, gamma=gamma)
    rows = zip(returns, batch.response_mask, strict=True)
    return [row[mask].tolist() for row, mask in rows]


def _table_values(
    training: Sequence[StoredRollout],
    returns: Sequence[Sequence[float]],
    heldout: Sequence[StoredRollout],
) -> list[list[float]]:
    everything = [value for row in returns for value in row]
    mean = sum(everything) / len(everything)
    sums: dict[str, tuple[float, int]] = {}
    for row, row_returns in zip(training, returns, strict=True):
        for state, value in zip(row.oracle_state or (), row_returns, strict=True):
            total, count = sums.get(state, (mean, 1))
            sums[state] = total + value, count + 1
    table = {state: total / count for state, (total, count) in sums.items()}
    return [[table.get(state, mean) for state in row.oracle_state or ()] for row in heldout]
