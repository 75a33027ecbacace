"""What the command line changed and nothing reads, so that nobody waits for its effect."""

from __future__ import annotations

from collections.abc import Iterator

from vapo.config.rules import value_at
from vapo.config.schema import FitConfig
from vapo.config.sources import is_under

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
        if (why := _why_unread(config, change.key)) is not None:
            yield f"{change.key}={change.after} has no effect: {why}"


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
