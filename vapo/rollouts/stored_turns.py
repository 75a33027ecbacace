"""The turns of a stored episode: what a row of the file says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from vapo.types import Rollout, Turn

COLUMNS = ("turn_observed", "turn_sampled", "turn_rewards")
_TOLERANCE = 1e-6  # of the sum of rewards, which another program may have added up otherwise


def turn_columns(rollout: Rollout) -> dict[str, Any]:
    """The columns of a row; null for a response, whose other columns say what its turn is."""
    if not rollout.in_environment:
        return dict.fromkeys(COLUMNS)
    return {
        "turn_observed": [turn.num_observed for turn in rollout.turns],
        "turn_sampled": [turn.num_sampled for turn in rollout.turns],
        "turn_rewards": [turn.reward for turn in rollout.turns],
    }


def is_episode(record: Mapping[str, Any]) -> bool:
    """Whether a row has turns, or says that it had none before its environment failed."""
    return any(record.get(name) is not None for name in COLUMNS)


def read_turns(
    record: Mapping[str, Any], length: int, fail: Callable[[str, str], NoReturn]
) -> tuple[Turn, ...]:
    """The turns of a row whose response has `length` tokens: one where it has no columns of them.

    Args:
        fail: raises the error about a column, with its reason.
    """
    if not is_episode(record):
        return (Turn(0, length, float(record["reward"])),)
    lists: dict[str, Any] = {name: record.get(name) for name in COLUMNS}
    size = len(lists["turn_sampled"]) if isinstance(lists["turn_sampled"], list) else 0
    for name, values in lists.items():
        if not isinstance(values, list) or len(values) != size:
            found = f"{len(values)} values" if isinstance(values, list) else "is no list"
            fail(name, f"{found}; each of the {size} turns of turn_sampled needs one")
    _check_counts(lists["turn_observed"], "turn_observed", 0, fail)
    _check_counts(lists["turn_sampled"], "turn_sampled", 1, fail)
    num = sum(lists["turn_observed"]) + sum(lists["turn_sampled"])
    if num != length:
        fail(
            "turn_sampled",
            f"the turns have {num} tokens, observed and sampled ones, and response_ids has "
            f"{length}",
        )
    rewards = lists["turn_rewards"]
    if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in rewards):
        fail("turn_rewards", "has values that are not finite")
    whole = record["reward"]
    if abs(sum(rewards) - whole) > _TOLERANCE * max(1.0, abs(whole)):
        fail("turn_rewards", f"add up to {sum(rewards):g}, and the reward is {whole:g}")
    return tuple(Turn(*turn) for turn in zip(*lists.values(), strict=True))


def _check_counts(
    values: Sequence[Any], name: str, least: int, fail: Callable[[str, str], NoReturn]
) -> None:
    if any(type(x) is not int or x < least for x in values):
        fail(name, f"has entries that are not whole numbers from {least} up")
