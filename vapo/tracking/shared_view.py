"""Defines which columns and charts MLflow's UI shows first for an experiment.

MLflow keeps a view that people share as a tag of the experiment, and an address names its key. By
itself it lists no score beside a run, and its charts begin with `actor/approx_kl`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment

VIEW_KEY = "vapo"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"
SCORE, SCORE_BEFORE = "eval/avg_at_k", "eval/avg_at_k_before"
_EXPLAINED_VARIANCE = "critic/explained_variance"
_COLUMNS = (SCORE_BEFORE, SCORE, _EXPLAINED_VARIANCE)
_COLUMN_WIDTH = 180  # pixels, so that the names can be read
_SECTION = "score, reward, critic, length"
_CHARTS = (
    SCORE,
    "rollout/reward_mean",
    _EXPLAINED_VARIANCE,
    "rollout/response_length_mean",
    "critic/value_loss",
)
"""The metrics of the first charts. They are lines: where MLflow chooses, a metric whose last step
is below 1 is a bar, as all are during value pretraining."""


def view_state() -> str:
    """Return the view as the JSON text that MLflow reads from the tag `VIEW_TAG`."""
    columns = [f"metrics.`{name}`" for name in _COLUMNS]
    section: dict[str, Any] = {"uuid": "vapo-section", "name": _SECTION, "display": True}
    state = {
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": dict.fromkeys(columns, _COLUMN_WIDTH),
        "compareRunSections": [section | {"isReordered": True, "deleted": False}],
        "compareRunCharts": [
            _line_chart(f"vapo-{number}", str(section["uuid"]), name)
            for number, name in enumerate(_CHARTS)
        ],
        "isAccordionReordered": True,  # else the sections are sorted by their names
    }
    return json.dumps(state)


def share_view(client: MlflowClient, experiment: Experiment) -> bool:
    """Set the experiment's tag for the view if needed; return whether it has one now."""
    from mlflow.exceptions import MlflowException

    state = view_state()
    if experiment.tags.get(VIEW_TAG) != state:
        try:
            client.set_experiment_tag(experiment.experiment_id, VIEW_TAG, state)
        except MlflowException:  # the store may only be read
            return VIEW_TAG in experiment.tags
    return True


def _line_chart(uuid: str, section: str, metric: str) -> dict[str, Any]:
    """Return the JSON fields of one MLflow line chart, which shows a metric against its steps."""
    return {
        "type": "LINE",
        "uuid": uuid,
        "metricSectionId": section,
        "isGenerated": False,
        "deleted": False,
        "runsCountToCompare": 10,
        "metricKey": metric,
        "displayName": metric.rpartition("/")[2],
        "lineSmoothness": 0,
        "scaleType": "linear",
        "xAxisScaleType": "linear",
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "range": {},
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }
