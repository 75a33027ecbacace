"""`vapo ui`: the MLflow UI on the store that `tracking.uri` names."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress

from vapo.commands.ui_hosts import allowed_hosts, allowed_origins
from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.system.ports import check_port
from vapo.tracking.links import (
    DESCRIPTION,
    curves_page,
    experiments_page,
    run_page,
    runs_page,
)
from vapo.tracking.metric_names import stored_names
from vapo.tracking.opening import client_of
from vapo.tracking.shared_view import SCORE, share_view
from vapo.tracking.stores import Store, locate_store
from vapo.user_code.python_child import python_command, python_environment

_WARNING = "starlette.middleware.wsgi is deprecated"
_CURE = (
    "give the id that `vapo fit` or `vapo sweep` printed; without --run, `vapo ui` shows all runs"
)


def run(tracking_uri: str, host: str, port: int, run: str | None = None) -> None:
    """Serve MLflow's pages of the store at `tracking_uri` until Ctrl-C.

    `run`: the id of the run whose page's address is printed, instead of the experiments' page.

    Raises: UserError: there is no such store or run, the port is taken, or the server ended by
        itself.
    """
    if run is not None and not run.strip():
        raise UserError(
            "--run: the run's id is empty; give the one that `vapo fit` or `vapo sweep` printed, "
            "or leave --run out to see all experiments"
        )
    store = locate_store(tracking_uri)
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
    server = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    pages = [experiments_page(server)]
    if run is not None:
        client = client_of(store, run, cure=_CURE)
        experiment_id = client.get_run(run).info.experiment_id
        of_sweep = f"tags.`mlflow.parentRunId` = '{run}' and tags.role = 'row'"
        runs = client.search_runs([experiment_id], of_sweep)
        if runs:
            ids = [run_info.info.run_id for run_info in runs]
            stored = stored_names(runs[0].data.metrics, SCORE)[
                :1
            ]  # a run of an older version may have another name for it
            curves = curves_page(server, experiment_id, ids, *stored)
            pages = [
                f"{run_page(server, experiment_id, run, DESCRIPTION)} (the sweep's table)",
                f"{curves} (the scores of its runs, side by side)",
            ]
        else:
            has_view = share_view(client, client.get_experiment(experiment_id))
            charts, table = (
                runs_page(server, experiment_id, charts=charts, has_view=has_view)
                for charts in (True, False)
            )
            pages = [
                f"{charts} (its charts beside those of its experiment's latest runs)",
                f"{table} (all these runs in a table, with their scores)",
                f"{run_page(server, experiment_id, run)} (this run alone, all its charts)",
            ]
    other = port + 1 if port < 65535 else 5000
    first = pages[0].partition(" ")[0]
    served = f"if the same store is already served there, open {first}; or "
    check_port(host, port, fix=f"choose another port, as --port {other}", in_use=served)
    say(f"MLflow UI of {store.shown_uri} (Ctrl-C ends it); in some 10 seconds, open")
    say("\n".join(f"  {page}" for page in pages))
    if code := _serve(server_command(store, host, port), server_environment(store)):
        raise UserError(f"MLflow's server ended with exit code {code}; what it said is above")


def _serve(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the server and return its exit code, 0 if Ctrl-C, SIGTERM or a closed terminal ended it.

    The server is in its own session: the Ctrl-C of a terminal goes to every process in the
    foreground, and each of MLflow's processes would print a traceback.
    """
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous_handlers = {
        number: signal.signal(number, signal.default_int_handler) for number in ends
    }
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        for number in ends:  # a second signal now would leave the server running
            signal.signal(number, signal.SIG_IGN)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def server_environment(store: Store) -> dict[str, str]:
    """Return the environment variables of MLflow's server.

    They have the URI of a database, because everyone on the host can read a process's arguments.
    """
    environment = python_environment()
    # one worker serves one reader; more would only take the training's cores
    environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    environment["MLFLOW_REGISTRY_STORE_URI"] = store.uri  # else it says that it takes the store's
    if store.database is None:
        environment["MLFLOW_BACKEND_STORE_URI"] = store.uri
    ignored = f"ignore:{_WARNING}"
    environment["PYTHONWARNINGS"] = ",".join(
        filter(None, [environment.get("PYTHONWARNINGS"), ignored])
    )
    return environment


def server_command(store: Store, host: str, port: int) -> list[str]:
    """Return the command that starts MLflow's server in this Python's environment."""
    command = python_command("mlflow", "server")
    if store.database is not None:
        command += ["--backend-store-uri", store.uri]
    if store.artifact_location:
        command += ["--default-artifact-root", store.artifact_location]
    # Uvicorn prints no line for every request, and none on how the server ends. It looks for the
    # server's module in its app-dir first, which by default would be the current folder.
    options = f"--log-level=warning --app-dir={shlex.quote(sysconfig.get_path('stdlib'))}"
    command += ["--host", host, "--port", str(port), "--workers", "1", "--uvicorn-opts", options]
    command += ["--allowed-hosts", ",".join(allowed_hosts(host, port))]
    return [*command, "--cors-allowed-origins", ",".join(allowed_origins(host, port))]
