"""Makes the addresses at which MLflow's UI shows a run, and the command that serves the UI.

MLflow 3 has a view for agents, which it opens by default, and one for training. The query of an
address decides which one is opened.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from urllib.parse import quote

from vapo.config.credentials import without_credentials
from vapo.tracking.shared_view import SCORE, VIEW_KEY
from vapo.tracking.stores import Store, locate_store

_TRAINING_VIEW = "?workflowType=machine_learning"


def experiments_page(server: str) -> str:
    return f"{server.rstrip('/')}/#/experiments{_TRAINING_VIEW}"


CHARTS, DESCRIPTION = "model-metrics", "overview"
"""The tabs of a run's page that show its charts, and its description with its latest metrics."""


def run_page(server: str, experiment_id: str, run_id: str, tab: str = CHARTS) -> str:
    """Return the address of a tab of a run's page at a server, by default of its charts.

    If `server` is empty, the address is a link within the UI.
    """
    place = f"#/experiments/{experiment_id}/runs/{run_id}/{tab}{_TRAINING_VIEW}"
    return f"{server.rstrip('/')}/{place}" if server else place


def runs_page(server: str, experiment_id: str, *, charts: bool, has_view: bool) -> str:
    """Return the address of a page with an experiment's runs: their charts, or a table of them.

    `has_view` says that the experiment has our view (`share_view`), whose first columns and charts
    are scores; the page then uses it.
    """
    place = f"#/experiments/{experiment_id}/runs{_TRAINING_VIEW}"
    place += "&compareRunsMode=CHART" if charts else ""
    place += f"&viewStateShareKey={VIEW_KEY}" if has_view else ""
    return f"{server.rstrip('/')}/{place}"


def curves_page(
    server: str, experiment_id: str, run_ids: Sequence[str], metric: str = SCORE
) -> str:
    """Return the address of a chart with each run's curve of the score, or of another `metric`.

    The page also lets one choose other metrics. `runs_page` cannot replace it: that page draws a
    sweep's parent in place of its runs, and has no filter that would leave the parent out.
    """
    parameters = {
        "runs": list(run_ids),
        "metric": metric,
        "experiments": [experiment_id],
        "plot_metric_keys": [metric],
    }
    query = "&".join(f"{key}={quote(json.dumps(value))}" for key, value in parameters.items())
    return f"{server.rstrip('/')}/#/metric?{query}&x_axis=step"


def how_to_open(tracking_uri: str, experiment_id: str, run_id: str, tab: str = CHARTS) -> str:
    """Return the address of a run's page on a server; else the command that shows it.

    The text has no credentials: commands take them from the environment.
    """
    store: Store = locate_store(tracking_uri)
    if store.is_http:
        return run_page(store.shown_uri, experiment_id, run_id, tab)
    if store.uri.startswith("databricks"):
        return f"run {run_id} in Databricks"
    bare = shlex.quote(without_credentials(tracking_uri))
    return f"vapo ui --run {run_id}{'' if bare == 'mlruns' else f' --tracking_uri {bare}'}"
