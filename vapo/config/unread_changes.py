"""What the command line changed and nothing reads is an error: nobody waits for its effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vapo.config.layers import COMMAND_LINE, ROW
from vapo.config.rules import value_at
from vapo.config.schema import FitConfig
from vapo.config.sources import Change, is_under
from vapo.errors import UserError

_SWITCHES = (
    "value_pretraining",
    "decoupled_gae",
    "length_adaptive_gae",
    "clip_higher",
    "positive_example_lm_loss",
)


def unread_changes(config: FitConfig) -> Iterator[str]:
    """A sentence on each such key, of the command line or of a grid's row.

    Config files may name what another file's switch turns off, as presets do; then it is no
    mistake, and nothing is said.
    """
    for change in config.sources.changes:
        if (said := _unread(config, change)) is not None:
            yield said


def check_changes_are_read(config: FitConfig) -> None:
    """Check that something reads each key that the command line of a run changes.

    Raises: UserError: nothing reads one of them.
    """
    for said in unread_changes(config):
        raise UserError(f"{COMMAND_LINE}: {said}; leave it out")


def check_rows_are_read(rows: Mapping[str, FitConfig]) -> None:
    """The same of the rows of a grid; what the command line changes is for all of them, and need
    be read by one.

    Raises: UserError: nothing reads a key; names the row, if it is a row's own.
    """
    for name, config in rows.items():
        for change in config.sources.changes:
            said = _unread(config, change)
            if said is not None and (change.is_of_row or _is_read_by_none(change.key, rows)):
                place = f"row '{name}' of the grid: {ROW}" if change.is_of_row else COMMAND_LINE
                raise UserError(f"{place}: {said}; leave it out")


def _is_read_by_none(key: str, rows: Mapping[str, FitConfig]) -> bool:
    return all(_why_unread(config, key) is not None for config in rows.values())


def _unread(config: FitConfig, change: Change) -> str | None:
    why = _why_unread(config, change.key)
    return None if why is None else f"{change.key}={change.after} has no effect: {why}"


def _why_unread(config: FitConfig, key: str) -> str | None:
    for name in _SWITCHES:
        block = f"components.{name}"
        is_on = value_at(config, f"{block}.enabled")
        if not is_on and key != f"{block}.enabled" and is_under(key, [block]):
            return f"{block}.enabled is false"
    if not config.algorithm.has_critic and is_under(key, ["critic"]):
        return f"algorithm.advantage_estimator {config.algorithm.advantage_estimator} has no critic"
    estimator = config.algorithm.advantage_estimator
    has_lambda = config.algorithm.uses_gae or estimator == "function"
    if key == "algorithm.lambda_policy" and not has_lambda:
        return f"algorithm.advantage_estimator {estimator} has no lambda"
    if key == "algorithm.lambda_policy" and config.components.length_adaptive_gae.enabled:
        return "lambda is that of components.length_adaptive_gae, which is on"
    return None
