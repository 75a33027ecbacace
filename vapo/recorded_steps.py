"""What a resumed run need not record again.

An iteration that was recorded after the last checkpoint is done again, with the same numbers.
MLflow would keep both; it has no way to take a value back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

Item = tuple[str, float, int, int]  # key, value, time, step


class RecordedSteps:
    """The last step of each key in the store: a key's steps only grow, so none is behind it."""

    def __init__(self, last: Mapping[str, int]) -> None:
        self._last = dict(last)

    def unseen(self, items: Sequence[Item]) -> list[Item]:
        """Those that are beyond what the store has."""
        return [item for item in items if item[3] > self._last.get(item[0], -1)]

    def add(self, items: Sequence[Item]) -> None:
        """They are in the store now."""
        for key, _, _, step in items:
            self._last[key] = max(step, self._last.get(key, -1))


def recorded_steps(client: MlflowClient, run_id: str) -> RecordedSteps:
    """As the store has them; one request."""
    metrics = client.get_run(run_id).data._metric_objs  # `.metrics` leaves the steps out
    return RecordedSteps({metric.key: metric.step for metric in metrics})
