"""Translates the names under which older versions of this package stored metrics.

A metric has the same name in docs/metrics.md, in MLflow, in the code and wherever it is shown.
Before 2026-11-26 a few metrics had other names, and most had a prefix in MLflow. Stores keep the
runs of those versions, so all code that reads a store translates names with these functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from vapo.tracking.stores import Store

_PREFIX = re.compile(
    r"^(?:z_(?=(?:eval(?:_\w+)?|actor|critic|rollout|advantage|faults|progress|watch)/)"
    r"|system/(?=(?:time|throughput|memory)/))"
)
RENAMED = {
    "rollout/num_tokens": "rollout/num_response_tokens",
    "rollout/staleness_iterations": "rollout/staleness_max",
    "rollouts/num_measured_prefixes": "rollouts/num_prefixes",
    "rollouts/pass_rate": "rollouts/accuracy",
    "truth/num_tokens": "truth/num_continuation_tokens",
    "vine/continuation_tokens": "vine/num_continuation_tokens",
}
"""Old name -> name."""


def present_name(stored: str) -> str:
    """Return a metric's present name for the name in a store or journal, which may be old.

    >>> [present_name(old) for old in ("_score_gsm8k/avg_at_k", "z_eval/num_prompts")]
    ['eval_gsm8k/avg_at_k', 'eval/num_prompts']
    >>> [present_name(old) for old in ("system/time/rollout_s", "system/cpu", "truth/num_tokens")]
    ['time/rollout_s', 'system/cpu', 'truth/num_continuation_tokens']
    """
    name = re.sub(r"^_score(?=[_/])", "eval", _PREFIX.sub("", stored))
    return RENAMED.get(name, name)


def by_present_name(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a run's latest values by present name; a value under that name goes first."""
    return {present_name(key): metrics[key] for key in sorted(metrics, key=_is_present)}


def stored_names(metrics: Iterable[str], name: str) -> list[str]:
    """Return those of a run's stored metric names whose present name is `name`."""
    return [stored for stored in metrics if present_name(stored) == name]


def recorded_metrics(store: Store, run_id: str) -> dict[str, list[tuple[int, float]]]:
    """Return a run's metrics by present name. Each is a list of (step, value) in order of steps."""
    client, points_by_name = store.client(), dict[str, list[tuple[int, float]]]()
    for stored in client.get_run(run_id).data.metrics:
        points = [(point.step, point.value) for point in client.get_metric_history(run_id, stored)]
        points_by_name.setdefault(present_name(stored), []).extend(points)
    return {name: sorted(points_by_name[name]) for name in sorted(points_by_name)}


def _is_present(stored: str) -> bool:
    return present_name(stored) == stored
