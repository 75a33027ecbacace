"""The columns of turns and of measured states in a stored row: read and checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from vapo.config import FitConfig
from vapo.config.hyperparameters import critic_is_punished
from vapo.errors import UserError
from vapo.rollouts.rollout_file import TRUTH_COLUMNS, TURN_COLUMNS
from vapo.user_code.process_protocol import reward_problem

if TYPE_CHECKING:  # a file is looked at before torch is loaded
    from vapo.types import RolloutBatch, Turn

_TARGETS = "components.value_pretraining.targets"
_TOLERANCE = 1e-6  # of the sum of rewards, which another program may have added up otherwise


@dataclass(frozen=True)
class FileRow:
    """One row of a file of rollouts, as it was read; its methods check entries.

    `where` names the row in messages. Each check raises UserError if an entry is wrong.
    """

    record: Mapping[str, Any]
    where: str

    def fail(self, column: str, reason: str) -> NoReturn:
        raise UserError(f"{self.where}, column {column}: {reason}")

    def check_list(self, column: str, values: Any, num: int, explanation: str) -> None:
        """Check that a column's `values` are a list of `num` entries.

        Args:
            explanation: ends the error, and says why there must be as many.

        Raises: UserError: `values` is anything else.
        """
        if not isinstance(values, list) or len(values) != num:
            size = f"{len(values)} values" if isinstance(values, list) else "is not a list"
            self.fail(column, f"{size}; {explanation}")

    def check_finite(self, column: str, values: Iterable[Any]) -> None:
        if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in values):
            self.fail(column, "has values that are not finite")

    def check_rewards(self, column: str, values: Sequence[Any]) -> None:
        """Check that the values are finite, and that the sum of their sizes is a possible reward.

        Raises: UserError: they are not.
        """
        self.check_finite(column, values)
        if problem := reward_problem(sum(map(abs, values))):
            self.fail(column, f"added up without their signs: {problem}")

    def check_whole(self, column: str, values: Iterable[Any], least: int) -> None:
        if any(type(x) is not int or x < least for x in values):
            self.fail(column, f"has entries that are not whole numbers from {least} up")


# ---- turns --------------------------------------------------------------------------------------


def is_episode(record: Mapping[str, Any]) -> bool:
    """Whether a stored row is an episode of an environment, not a plain response.

    In an episode's row a turn column is not null. Empty columns mean that the environment failed
    before the first turn.
    """
    return any(record.get(name) is not None for name in TURN_COLUMNS)


def read_turns(row: FileRow, length: int) -> tuple[Turn, ...]:
    """Return the turns of an episode's row, whose response has `length` tokens.

    Raises: UserError: an entry is wrong, or the turns do not add up to the tokens and the reward.
    """
    from vapo.types import Turn

    whole = float(row.record["reward"])
    lists: dict[str, Any] = {name: row.record.get(name) for name in TURN_COLUMNS}
    observed, sampled, rewards = lists.values()
    size = len(sampled) if isinstance(sampled, list) else 0
    for name, values in lists.items():
        row.check_list(name, values, size, f"each of the {size} turns of turn_sampled needs one")
    row.check_whole("turn_observed", observed, 0)
    row.check_whole("turn_sampled", sampled, 1)
    if (num := sum(observed) + sum(sampled)) != length:
        row.fail(
            "turn_sampled",
            f"the turns have {num} tokens, observed and sampled ones, and response_ids has "
            f"{length}",
        )
    row.check_rewards("turn_rewards", rewards)
    if abs(sum(rewards) - whole) > _TOLERANCE * max(1.0, abs(whole)):
        row.fail("turn_rewards", f"add up to {sum(rewards):g}, and the reward is {whole:g}")
    return tuple(Turn(*turn) for turn in zip(*lists.values(), strict=True))


# ---- measured states ----------------------------------------------------------------------------


class StoredTruth(NamedTuple):
    """The measured value of the state after a row's first `num_tokens` tokens.

    `value` is the mean of its continuations' returns, and `num_draws` is how many of them count for
    the row (`MeasuredState.num_draws`).
    """

    num_tokens: int
    value: float
    num_draws: float


def read_truth(row: FileRow, length: int) -> tuple[StoredTruth, ...]:
    """Return the states of a row whose values were measured; its response has `length` tokens.

    Another program may leave out all columns of measured states; then there are none. It may leave
    out `truth_rows` alone; then each state counts for one row.

    Raises: UserError: an entry is wrong.
    """
    columns: dict[str, Any] = {name: row.record.get(name) for name in TRUTH_COLUMNS}
    tokens, num = columns["truth_tokens"], columns.pop("truth_continuations")
    if tokens is None:
        for name in TRUTH_COLUMNS:
            if row.record.get(name) is not None:
                row.fail(name, "is given, but truth_tokens is null: give both, or neither")
        return ()
    if type(num) is not int or num < 1:
        row.fail("truth_continuations", f"{num!r} is not a whole number from 1 up")
    if columns["truth_rows"] is None and isinstance(tokens, list):
        columns["truth_rows"] = [1] * len(tokens)
    for name, values in columns.items():
        explanation = f"each of the {len(tokens)} entries of truth_tokens needs one"
        row.check_list(name, values, len(tokens), explanation)
    _check_places(row, tokens, length)
    row.check_rewards("truth_values", columns["truth_values"])
    row.check_finite("truth_noise", columns["truth_noise"])
    if any(x < 0 for x in columns["truth_noise"]):
        row.fail("truth_noise", "is a variance, and has values below 0")
    row.check_whole("truth_rows", columns["truth_rows"], 1)
    return tuple(
        StoredTruth(place, float(value), num / rows)
        for place, value, _, rows in zip(*columns.values(), strict=True)
    )


def _check_places(row: FileRow, tokens: list[Any], length: int) -> None:
    if not all(type(place) is int for place in tokens):
        row.fail("truth_tokens", "has entries that are not whole numbers")
    if tokens != sorted(set(tokens)):
        row.fail("truth_tokens", "does not ascend: each prefix of a response is measured once")
    outside = next((place for place in tokens if not 0 <= place < length), None)
    if outside is not None:
        row.fail(
            "truth_tokens",
            f"{outside} is not from 0 to {length - 1}: the prefix leaves a token of the response's "
            f"{length} to sample",
        )


def returns_settings(config: FitConfig) -> dict[str, Any]:
    """Return the settings on which the return of a continuation depends, beside its verdict.

    They are `gamma`, and `punished`: the limit of response tokens, and over how many tokens before
    it the punishment of overlong responses grows; None: the critic's reward does not include it.
    """
    overlong, max_tokens = config.rewards.overlong, config.rollouts.max_response_tokens
    punished = (
        [max_tokens, overlong.ramp_tokens(max_tokens)] if critic_is_punished(config) else None
    )
    return {"gamma": config.algorithm.gamma, "punished": punished}


def check_truth(
    config: FitConfig,
    truths: Iterable[Sequence[StoredTruth]],
    metadata: Mapping[str, Any],
    path: Path,
) -> None:
    """Check that value pretraining can use a file's measured states, if its targets are `truth`.

    Args:
        truths: the measured states of each row.
        metadata: the file's metadata, with the settings of the returns.

    Raises: UserError: no row has measured states, or the returns were computed with other settings.
    """
    if config.components.value_pretraining.targets != "truth":
        return
    if not any(truths):
        raise UserError(
            f"{_TARGETS} truth: {path} has no continuations (its columns truth_tokens and "
            "truth_values are absent or empty): sample them with `vapo rollouts --value_truth 4`, "
            f"or set {_TARGETS}=returns"
        )
    file_settings, settings = metadata.get("value_truth") or {}, returns_settings(config)
    if "gamma" in file_settings and file_settings["gamma"] != settings["gamma"]:
        raise UserError(
            f"{_TARGETS} truth: the returns of {path} are discounted with gamma "
            f"{file_settings['gamma']:g}, and algorithm.gamma is {settings['gamma']:g}: set it to "
            f"the file's, or {_TARGETS}=returns"
        )
    if "punished" in file_settings and file_settings["punished"] != settings["punished"]:
        raise UserError(
            f"{_TARGETS} truth: the returns in {path} were measured with "
            f"{_punishment(file_settings['punished'])}, but the config has "
            f"{_punishment(settings['punished'])}: set rewards.overlong, critic.reward and "
            f"rollouts.max_response_tokens as they were, or {_TARGETS}=returns"
        )


def _punishment(punished: Sequence[int] | None) -> str:
    if punished is None:
        return "no overlong punishment"
    return f"an overlong punishment over the last {punished[1]} of {punished[0]} tokens"


def with_truth(batch: RolloutBatch, truths: Sequence[Sequence[StoredTruth]]) -> RolloutBatch:
    """Return the batch with the columns `measured_values` and `measured_draws`.

    They have for each state whose value was measured the mean return of its continuations, and how
    many of these count for the row; 0 for all other states.

    Args:
        truths: the measured states of each row.
    """
    values, draws = (batch.rewards.new_zeros(batch.response_mask.shape) for _ in range(2))
    for row, truth in enumerate(truths):
        for state in truth:
            values[row, state.num_tokens] = state.value
            draws[row, state.num_tokens] = state.num_draws
    return replace(batch, measured_values=values, measured_draws=draws)
