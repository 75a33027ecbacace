"""Where MLflow's UI shows a run: addresses, and the command that serves them.

MLflow 3 has a view for agents, which a browser shows first, and one for training. The query of an
address decides which one it opens.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from urllib.parse import quote

from vapo.config.credentials import without_credentials
from vapo.tracking.stores import Store, locate_store

_TRAINING_VIEW = "?workflowType=machine_learning"
SCORE = "eval/avg_at_k"


def experiments_page(server: str) -> str:
    return f"{server.rstrip('/')}/#/experiments{_TRAINING_VIEW}"


def run_page(server: str, experiment_id: str, run_id: str, tab: str = "model-metrics") -> str:
    """A run's page, by default its charts; with `server` empty, a link within the UI."""
    place = f"#/experiments/{experiment_id}/runs/{run_id}/{tab}{_TRAINING_VIEW}"
    return f"{server.rstrip('/')}/{place}" if server else place


def runs_page(server: str, experiment_id: str) -> str:
    """The runs of an experiment with their charts side by side."""
    place = f"#/experiments/{experiment_id}/runs{_TRAINING_VIEW}&compareRunsMode=CHART"
    return f"{server.rstrip('/')}/{place}"


def curves_page(
    server: str, experiment_id: str, run_ids: Sequence[str], metric: str = SCORE
) -> str:
    """The score's curve of each of these runs in one chart; other metrics are chosen beside it.

    The page of an experiment's runs (`runs_page`) draws the parent of a sweep in their place: it
    folds children up, and takes no filter that would leave the parent out.
    """
    parameters = {
        "runs": list(run_ids),
        "metric": metric,
        "experiments": [experiment_id],
        "plot_metric_keys": [metric],
    }
    query = "&".join(f"{key}={quote(json.dumps(value))}" for key, value in parameters.items())
    return f"{server.rstrip('/')}/#/metric?{query}&x_axis=step"


def how_to_open(tracking_uri: str, experiment_id: str, run_id: str) -> str:
    """The address of a run on a server; for another store the command that serves it.

    Without credentials: a command takes them from the environment.
    """
    store: Store = locate_store(tracking_uri)
    if store.is_http:
        return run_page(store.shown_uri, experiment_id, run_id)
    if store.uri.startswith("databricks"):
        return f"run {run_id} in Databricks"
    bare = shlex.quote(without_credentials(tracking_uri))
    return f"vapo ui --run {run_id}{'' if bare == 'mlruns' else f' --tracking_uri {bare}'}"
