"""Credentials reach MLflow by variables, and nothing else that is started or printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders import free_port
from tests.config.fits import MINIMAL, write
from vapo.commands import ui
from vapo.commands.sweep import command_line
from vapo.config import FitConfig
from vapo.config.loading import from_yaml
from vapo.config.written import to_yaml
from vapo.errors import UserError
from vapo.rewards.verifier_code import VerifierCode
from vapo.sweep.grid import read_grid
from vapo.sweep.plan import make_plan
from vapo.sweep.recording import ParentRun
from vapo.tracking.stores import locate_store
from vapo.user_code.host_process import HostProcess

NAMES = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
DATABASE = "postgresql://me:pa55word@127.0.0.1:1/db"


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    yield
    locate_store("mlruns").hand_over_credentials()  # takes back what a test handed over


def variables() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


def test_a_servers_credentials_are_variables_and_its_uri_has_none() -> None:
    store = locate_store("http://me:pa%2F55@127.0.0.1:5000/x")
    assert store.client_uri == store.shown_uri == "http://127.0.0.1:5000/x"
    store.hand_over_credentials()
    assert variables() == [None, "me", "pa/55"]
    assert "55" not in repr(store)


def test_no_store_gets_the_password_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "own")
    locate_store("http://me:word@127.0.0.1:5000").hand_over_credentials()
    locate_store(DATABASE).hand_over_credentials()
    assert variables() == [DATABASE, "own", None]
    locate_store("http://127.0.0.1:6000").hand_over_credentials()
    assert variables() == [None, "own", None]


def test_a_database_has_its_credentials_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", DATABASE + "?password=other&x=y")
    store = locate_store("postgresql://127.0.0.1:1/db?x=y")
    assert store.client_uri == DATABASE + "?password=other&x=y"
    assert store.shown_uri == "postgresql://127.0.0.1:1/db?x=y"
    assert locate_store("postgresql://127.0.0.1:1/other").client_uri.endswith("1/other")
    own = "postgresql://you:word@127.0.0.1:1/db?x=y"
    assert locate_store(own).client_uri == own


@pytest.mark.parametrize(
    "uri",
    [
        "http://me:pa?55word@host",
        "http://me:pa#55word@host",
        "http://host?token=pa55word",
        "http://me:pa55word@",
    ],
)
def test_a_servers_uri_that_cannot_be_read_is_an_error_that_does_not_quote_it(uri: str) -> None:
    with pytest.raises(UserError) as caught:
        locate_store(uri)
    assert "55word" not in str(caught.value)
    assert "MLFLOW_TRACKING_PASSWORD" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"cannot connect to {DATABASE}: no",
        'Could not parse "pa55word" in it',
        "me:pa55word@127.0.0.1 is away",
        "401: you sent Basic bWU6cGE1NXdvcmQ=",
        "401: {'Authorization': 'Basic bWU6cGE1NXdvcmQ='}",
        "401: bWU6cGE1NXdvcmQ= is not known",
        "at /login?user=me&next=%2Fdb%3Fpassword%3Dpa55word",
    ],
)
def test_errors_are_shown_without_the_password(text: str) -> None:
    shown = locate_store(DATABASE).redact(text)
    assert "pa55word" not in shown
    assert "cGE1NXdvcmQ" not in shown


def test_the_ui_has_a_databases_password_in_its_environment_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[list[str], dict[str, str]]] = []

    def start(command: list[str], env: dict[str, str], **_: Any) -> Any:
        calls.append((command, env))
        return real_popen([sys.executable, "-c", ""], start_new_session=True)

    real_popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", "of before")
    ui.run(DATABASE, "127.0.0.1", free_port())
    ((command, environment),) = calls
    assert command[:5] == [sys.executable, "-P", "-m", "mlflow", "server"]
    assert not [word for word in command if "pa55word" in word or "store-uri" in word]
    assert environment["MLFLOW_BACKEND_STORE_URI"] == DATABASE
    out = capsys.readouterr().out
    assert "postgresql://127.0.0.1:1/db" in out
    assert "pa55word" not in out


def test_verifiers_have_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "MLFLOW_TRACKING_TOKEN", "VLLM_API_KEY", "PGPASSWORD", "DB_PASS"):
        monkeypatch.setenv(name, "pa55word")
    host = HostProcess(VerifierCode(kind="math"))
    try:
        environment = Path(f"/proc/{host.process.pid}/environ").read_bytes()
    finally:
        host.stop()
    assert b"pa55word" not in environment


def test_a_sweeps_command_and_rows_have_no_credentials(tmp_path: Path) -> None:
    overrides = ["tracking.uri=http://me:pa55word@host", "seed=${oc.env:VAPO_TEST_SEED}"]
    command = command_line([Path("a.yaml")], Path("g.yaml"), [0], overrides)
    assert "tracking.uri=http://host" in command
    assert "seed=${oc.env:VAPO_TEST_SEED}" in command
    rows = "rows: [{list: [{tracking.uri: 'http://me:pa55word@host'}]}]"
    (row,) = read_grid(write(tmp_path, rows, "grid.yaml")).rows
    assert row.name == "uri http://host"
    assert "pa55word" in row.overrides[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uri", "written"),
    [
        ("http://me:pa55word@host", "http://host"),
        ("http://me:${oc.env:VAPO_TEST_WORD}@host", "http://me:${oc.env:VAPO_TEST_WORD}@host"),
        ("${oc.env:VAPO_TEST_DB}", "${oc.env:VAPO_TEST_DB}"),
        ("${oc.env:VAPO_TEST_HOME}/mlruns", "${oc.env:VAPO_TEST_HOME}/mlruns"),
        (DATABASE, "postgresql://127.0.0.1:1/db"),
        ("mlruns", f"sqlite:///{Path.cwd()}/mlruns/mlflow.db"),
    ],
)
def test_a_sweeps_child_has_the_parents_store_and_not_its_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, written: str
) -> None:
    monkeypatch.setenv("VAPO_TEST_WORD", "pa55word")
    monkeypatch.setenv("VAPO_TEST_DB", DATABASE)
    monkeypatch.setenv("VAPO_TEST_HOME", str(tmp_path))
    grid = read_grid(write(tmp_path, "rows: [{row: base}]", "grid.yaml"))
    plan = make_plan(grid, [write(tmp_path, MINIMAL)], [f"tracking.uri={uri}"], [0])
    parent = object.__new__(ParentRun)
    parent.plan, parent.run_id = plan, "0123"
    parent.store = locate_store(plan.base.tracking.uri)
    task = plan.tasks[-1]
    text = to_yaml(parent.child_config(task, task.config))
    assert yaml.safe_load(text)["tracking"]["uri"] == written
    assert "pa55word" not in text
    parent.store.hand_over_credentials()
    child = locate_store(from_yaml(FitConfig, text, source="child").tracking.uri)
    assert child.client_uri == parent.store.client_uri
    assert child.database == parent.store.database
