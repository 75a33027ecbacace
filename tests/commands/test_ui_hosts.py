"""Pages of the internet cannot read what `vapo ui` serves, under no name and from no origin."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from mlflow.server.security_utils import is_allowed_host_header, should_block_cors_request

from tests.tracking.ready_stores import ready_store
from vapo.commands import ui, ui_hosts
from vapo.commands.ui_hosts import allowed_hosts, allowed_origins
from vapo.tracking.stores import locate_store

PORT = 5873
FOREIGN = [
    "10.evil.example:5873", "192.168.evil.example:5873", "172.16.evil.example", "evil.example",
    "fc00:evil", "localhost:5874", "127.0.0.1", "localhost.evil.example:5873", "0.0.0.0:5873",
    "127.0.0.1.evil.example:5873", "127.0.0.2:5873", "10.0.0.1:5873", "", "*", "localhost:58730",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_SERVER_ALLOWED_HOSTS", "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "192.0.2.7", "my-box"])
def test_the_server_answers_to_its_own_names_alone(host: str) -> None:
    """By MLflow's own functions, which take a name with a `*` for a pattern."""
    hosts, origins = allowed_hosts(host, PORT), allowed_origins(host, PORT)
    assert not [name for name in (*hosts, *origins) if "*" in name]
    for own in ("localhost:5873", "127.0.0.1:5873", "[::1]:5873"):
        assert is_allowed_host_header(hosts, own)
        assert not should_block_cors_request(f"http://{own}", "POST", origins)
    asked = f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}"
    assert is_allowed_host_header(hosts, asked)
    assert not should_block_cors_request(f"http://{asked}", "POST", origins)
    for name in FOREIGN:
        assert not is_allowed_host_header(hosts, name), name
    for name in ("10.evil.example:5873", "evil.example", "localhost.evil.example:5873", "10.0.0.1"):
        assert should_block_cors_request(f"http://{name}", "POST", origins), name
    assert should_block_cors_request("null", "POST", origins)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_on_all_addresses_it_answers_to_this_machine_s(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "My-Box")
    monkeypatch.setattr(socket, "getfqdn", lambda: "my-box.example")
    addresses = [("AF_INET", "192.0.2.7"), ("AF_INET6", "fe80::1%eth0"), ("AF_PACKET", "02:42")]

    class Address:
        def __init__(self, family: str, address: str) -> None:
            self.family, self.address = getattr(socket, family, None), address

    found = {"eth0": [Address(*each) for each in addresses]}
    monkeypatch.setattr(ui_hosts.psutil, "net_if_addrs", lambda: found)
    assert allowed_hosts(host, PORT) == [
        *("localhost:5873", "127.0.0.1:5873", "[::1]:5873"),
        *("my-box:5873", "my-box.example:5873", "192.0.2.7:5873", "[fe80::1]:5873"),
    ]


def test_further_names_are_those_of_mlflow_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SERVER_ALLOWED_HOSTS", "runs.example, 10.0.0.1:80")
    monkeypatch.setenv("MLFLOW_SERVER_CORS_ALLOWED_ORIGINS", "https://runs.example")
    assert allowed_hosts("127.0.0.1", PORT)[3:] == ["runs.example", "10.0.0.1:80"]
    assert allowed_origins("127.0.0.1", PORT)[-1] == "https://runs.example"


def test_a_browser_leaves_the_port_80_out() -> None:
    assert {"localhost", "localhost:80", "[::1]"} < set(allowed_hosts("127.0.0.1", 80))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A port at which the real server listens, started in a folder of hostile files."""
    store = locate_store(str(ready_store(tmp_path / "store")))
    here = tmp_path / "here"
    here.mkdir()
    for name in ("random", "mlflow", "uvicorn", "socket", "fastapi", "sitecustomize"):
        (here / f"{name}.py").write_text("open('executed', 'a').write(__name__)\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (tmp_path / "log.txt").open("wb") as log:
        server = subprocess.Popen(
            ui.server_command(store, "127.0.0.1", port),
            env=ui.server_environment(store),
            cwd=here,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while status(port, f"127.0.0.1:{port}") is None:
            assert time.monotonic() < deadline
            assert server.poll() is None, (tmp_path / "log.txt").read_text()
            time.sleep(0.2)
        yield port, tmp_path
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def status(port: int, host: str, method: str = "GET", origin: str | None = None) -> int | None:
    """What the server answers under this name; None: nobody does."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Host": host, "Content-Type": "application/json"}
    body = '{"name": "x"}' if method == "POST" else None
    path = f"/api/2.0/mlflow/experiments/{'create' if body else 'get?experiment_id=0'}"
    try:
        connection.request(
            method, path, body=body, headers=headers | ({"Origin": origin} if origin else {})
        )
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


@pytest.mark.attacks
def test_a_real_server_refuses_them_and_executes_no_file_of_the_folder(
    served: tuple[int, Path],
) -> None:
    port, folder = served
    own = f"127.0.0.1:{port}"
    for name in (own, f"localhost:{port}", f"[::1]:{port}"):
        assert status(port, name) == 200
    for name in (f"10.evil.example:{port}", f"192.168.evil.example:{port}", "evil.example", "10.1"):
        assert status(port, name) == 403, name
    assert status(port, own, "POST", "http://evil.example") == 403
    assert status(port, own, "POST", "null") == 403
    assert status(port, own, "POST", f"http://{own}") == 200
    assert not (folder / "here/executed").exists(), (folder / "here/executed").read_text()
    log = (folder / "log.txt").read_text()
    assert "Registry store URI" not in log
    assert "deprecated" not in log
