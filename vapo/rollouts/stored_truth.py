"""Measured states of stored rollouts: columns of the file, and of a batch for its value targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from vapo.config import FitConfig
from vapo.config.critic_rules import critic_is_punished
from vapo.errors import UserError

if TYPE_CHECKING:  # a file is looked at before torch is loaded
    from vapo.rollouts.continuations import MeasuredState
    from vapo.types import RolloutBatch

COLUMNS = ("truth_tokens", "truth_values", "truth_noise", "truth_continuations", "truth_rows")
_LISTS = tuple(name for name in COLUMNS if name != "truth_continuations")
_TARGETS = "components.value_pretraining.targets"


class StoredTruth(NamedTuple):
    """What value targets read of a state that a row's first `num_tokens` tokens lead to.

    `value` is the mean of its continuations' returns, `num_draws` how many of them count for the
    row (`MeasuredState.num_draws`).
    """

    num_tokens: int
    value: float
    num_draws: float


def truth_columns(states: Sequence[MeasuredState]) -> dict[str, Any]:
    """The columns of a row, of its measured states in their order; null where none was measured."""
    if not states:
        return dict.fromkeys(COLUMNS)
    return {
        "truth_tokens": [state.num_tokens for state in states],
        "truth_values": [state.mean for state in states],
        "truth_noise": [state.noise for state in states],
        "truth_continuations": len(states[0].returns),
        "truth_rows": [state.num_places for state in states],
    }


def read_truth(
    record: Mapping[str, Any], length: int, fail: Callable[[str, str], NoReturn]
) -> tuple[StoredTruth, ...]:
    """What a row says of measured states of its response of `length` tokens; none where none is.

    Another program may leave out all columns, or `truth_rows` alone, which are 1 then.

    Args:
        fail: raises the error about a column, with its reason.
    """
    tokens, num = record.get("truth_tokens"), record.get("truth_continuations")
    if tokens is None:
        for name in COLUMNS:
            if record.get(name) is not None:
                fail(name, "is given, and truth_tokens is null: both, or neither")
        return ()
    if type(num) is not int or num < 1:
        fail("truth_continuations", f"{num!r} is not a whole number from 1 up")
    lists: dict[str, Any] = {name: record.get(name) for name in _LISTS}
    if lists["truth_rows"] is None and isinstance(tokens, list):
        lists["truth_rows"] = [1] * len(tokens)
    for name, values in lists.items():
        if not isinstance(values, list) or len(values) != len(tokens):
            size = f"{len(values)} values" if isinstance(values, list) else "is no list"
            fail(name, f"{size}; each of the {len(tokens)} entries of truth_tokens needs one")
    _check_places(lists["truth_tokens"], length, fail)
    for name in ("truth_values", "truth_noise"):
        if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in lists[name]):
            fail(name, "has values that are not finite")
    if any(x < 0 for x in lists["truth_noise"]):
        fail("truth_noise", "is a variance, and has values below 0")
    if any(type(x) is not int or x < 1 for x in lists["truth_rows"]):
        fail("truth_rows", "has entries that are not whole numbers from 1 up")
    return tuple(
        StoredTruth(place, float(value), num / rows)
        for place, value, _, rows in zip(*lists.values(), strict=True)
    )


def _check_places(tokens: list[Any], length: int, fail: Callable[[str, str], NoReturn]) -> None:
    if not all(type(place) is int for place in tokens):
        fail("truth_tokens", "has entries that are not whole numbers")
    if list(tokens) != sorted(set(tokens)):
        fail("truth_tokens", "does not ascend: each prefix of a response is measured once")
    outside = next((place for place in tokens if not 0 <= place < length), None)
    if outside is not None:
        fail(
            "truth_tokens",
            f"{outside} is not from 0 to {length - 1}: the prefix leaves a token of the response's "
            f"{length} to sample",
        )


def returns_settings(config: FitConfig) -> dict[str, Any]:
    """What the return of a continuation depends on, beside its verdict.

    `punished`: the budget and the ramp of the overlong punishment, where the critic's reward has
    it.
    """
    overlong, most = config.rewards.overlong, config.rollouts.max_response_tokens
    punished = [most, overlong.ramp_tokens(most)] if critic_is_punished(config) else None
    return {"gamma": config.algorithm.gamma, "punished": punished}


def check_truth(
    config: FitConfig,
    truths: Iterable[Sequence[StoredTruth]],
    metadata: Mapping[str, Any],
    path: Path,
) -> None:
    """Nothing where value targets are the responses' own returns.

    Args:
        truths: what each row of the file says.

    Raises: UserError: none says anything, or the returns are of other settings.
    """
    if config.components.value_pretraining.targets != "truth":
        return
    if not any(truths):
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


def with_truth(batch: RolloutBatch, truths: Sequence[Sequence[StoredTruth]]) -> RolloutBatch:
    """The batch with the mean return of each row's continuations, and how many count for it."""
    values, draws = (batch.rewards.new_zeros(batch.response_mask.shape) for _ in range(2))
    for row, truth in enumerate(truths):
        for known in truth:
            values[row, known.num_tokens] = known.value
            draws[row, known.num_tokens] = known.num_draws
    return replace(batch, measured_values=values, measured_draws=draws)
