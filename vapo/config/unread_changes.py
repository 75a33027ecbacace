"""Find keys that the command line changes although nothing reads them.

Such a key is an error, but for the settings of a component that is switched off: they have an
effect once it is switched on, and a run says so in one line.
"""

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
    """Yield a sentence on each key that the command line or a grid's row changes and nothing reads.

    Config files may name what another file's switch turns off, as presets do. That is not a
    mistake, and no sentence reports it.
    """
    for change in config.sources.changes:
        why = _off_switch(config, change.key) or _why_ignored(config, change.key)
        if why is not None:
            yield _sentence(change, why)


def check_changes_are_read(config: FitConfig) -> None:
    """Check that a run whose components are all on would read what its command line changed.

    Raises: UserError: nothing reads a key.
    """
    for change in config.sources.changes:
        if (why := _why_ignored(config, change.key)) is not None:
            raise UserError(f"{COMMAND_LINE}: {_sentence(change, why)}; leave it out")


def check_rows_are_read(rows: Mapping[str, FitConfig]) -> None:
    """Check that the runs of a grid would read each key that a row or the command line changes.

    A row must read what it changes. What the command line changes must be read by at least one row.

    Raises: UserError: nothing reads a key; names the row, if it is a row's own.
    """
    for name, config in rows.items():
        for change in config.sources.changes:
            if (why := _why_ignored(config, change.key)) is None:
                continue
            if change.is_of_row:
                place = f"row '{name}' of the grid: {ROW}"
            elif all(_why_ignored(other, change.key) is not None for other in rows.values()):
                place = COMMAND_LINE
            else:
                continue
            raise UserError(f"{place}: {_sentence(change, why)}; leave it out")


def _sentence(change: Change, why: str) -> str:
    return f"{change.key}={change.after} has no effect: {why}"


def _off_switch(config: FitConfig, key: str) -> str | None:
    """Return `KEY is false` for the switch of a component of which the key is a setting.

    The result is None if the switch is on, or the key is not a setting of such a component.
    """
    for name in _SWITCHES:
        block = f"components.{name}"
        is_on = value_at(config, f"{block}.enabled")
        if not is_on and key != f"{block}.enabled" and is_under(key, [block]):
            return f"{block}.enabled is false"
    return None


def _why_ignored(config: FitConfig, key: str) -> str | None:
    """Return why nothing reads the key, whichever components are on; None if something does."""
    estimator = config.algorithm.advantage_estimator
    if not config.algorithm.has_critic and is_under(key, ["critic"]):
        return f"algorithm.advantage_estimator {estimator} has no critic"
    has_lambda = config.algorithm.uses_gae or estimator == "function"
    if key == "algorithm.lambda_policy" and not has_lambda:
        return f"algorithm.advantage_estimator {estimator} has no lambda"
    if key == "algorithm.lambda_policy" and config.components.length_adaptive_gae.enabled:
        return "lambda is that of components.length_adaptive_gae, which is on"
    return None
