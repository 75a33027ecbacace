"""`vapo ui`: the MLflow UI on the store that `tracking.uri` names."""

from __future__ import annotations

import os
import sys

from vapo.errors import UserError
from vapo.system.ports import check_port
from vapo.tracking.links import experiments_page, run_page
from vapo.tracking.opening import client_of
from vapo.tracking.stores import Store, locate_store


def run(tracking_uri: str, host: str, port: int, run: str | None = None) -> None:
    """Become the MLflow server of this store, until Ctrl-C.

    `run`: the id of the run whose page's address is printed, instead of the experiments' page.
    """
    store = locate_store(tracking_uri)
    _check_store(store)
    server = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    page = experiments_page(server)
    if run is not None:
        experiment_id = client_of(store, run).get_run(run).info.experiment_id
        page = run_page(server, experiment_id, run)
    other = port + 1 if port < 65535 else 5000
    check_port(host, port, fix=f"choose another port, as --port {other}")
    os.environ.update(server_environment(store))
    print(f"MLflow UI of {store.shown_uri} (Ctrl-C ends it); in some 10 seconds, open")
    print(f"  {page}", flush=True)
    command = server_command(store, host, port)
    os.execv(command[0], command)


def server_command(store: Store, host: str, port: int) -> list[str]:
    """MLflow's server in this Python's environment.

    Everyone on the host can read a process's arguments, so a database's URI is not among them:
    see `server_environment`.
    """
    command = [sys.executable, "-m", "mlflow", "server"]
    if store.database is not None:
        command += ["--backend-store-uri", store.uri]
    if store.artifact_location:
        command += ["--default-artifact-root", store.artifact_location]
    return [*command, "--host", host, "--port", str(port), "--workers", "1"]


def server_environment(store: Store) -> dict[str, str]:
    """Variables that MLflow's server reads."""
    # One worker serves one reader; more would only take the training's cores.
    variables = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    if store.database is None:
        variables["MLFLOW_BACKEND_STORE_URI"] = store.uri
    return variables


def _check_store(store: Store) -> None:
    if store.is_http or store.uri.startswith("databricks"):
        raise UserError(
            f"tracking.uri: {store.shown_uri} is a server with a UI of its own: open it in a "
            "browser; `vapo ui` is for a local folder or a database"
        )
    if store.database and not store.database.is_file():
        raise UserError(
            f"tracking.uri: nothing is recorded in {store.database.parent} yet (no "
            f"{store.database.name}); run `vapo fit` first, or name another folder"
        )
