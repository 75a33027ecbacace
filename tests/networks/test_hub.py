"""A hub that cannot be reached is noticed in seconds, and only what is in its cache is read."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.constants import is_offline_mode

from vapo.config.data import HuggingfaceSource
from vapo.errors import UserError
from vapo.networks import hub
from vapo.networks.model_folders import folder_with_config
from vapo.prompts.sources import check_source


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[socket.socket]:
    """A hub of this machine, in place of the real one; closed, it refuses. Its cache is empty."""
    listener = socket.create_server(("127.0.0.1", 0))
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path))
    forget()
    yield listener
    listener.close()
    forget()


def forget() -> None:
    hub._why_offline.cache_clear()
    hub._say_that_the_cache_is_read.cache_clear()


def cache_model(tmp_path: Path) -> None:
    folder = tmp_path / "hub/models--nobody--nothing"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("c0")
    (folder / "snapshots/c0").mkdir(parents=True)
    (folder / "snapshots/c0/config.json").write_text("{}")


def test_a_model_of_a_hub_that_refuses_is_an_error_unless_it_is_in_the_cache(
    endpoint: socket.socket, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    endpoint.close()
    why = (
        r"nobody/nothing: there is no such folder here, and as a hub id it cannot be had: the "
        r"Hugging Face hub \(127.0.0.1\) cannot be reached \(.*refused.*\), and its cache has no "
        r"model of this name. Give a local folder"
    )
    with pytest.raises(UserError, match=why):
        folder_with_config("nobody/nothing")
    assert capsys.readouterr().err == "", "the error says it"
    cache_model(tmp_path)
    assert folder_with_config("nobody/nothing") is None
    assert is_offline_mode()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "reached" in capsys.readouterr().err
    folder_with_config("nobody/nothing")
    assert capsys.readouterr().err == "", "once"


@pytest.mark.parametrize("cached", ["hub/datasets--nobody--nothing", "datasets/nobody___nothing"])
def test_a_dataset_of_a_hub_that_refuses(
    endpoint: socket.socket, tmp_path: Path, cached: str
) -> None:
    endpoint.close()
    source = HuggingfaceSource(path="nobody/nothing")
    with pytest.raises(UserError, match=r"data.train.path: nobody/nothing: there is no such file"):
        check_source(source, key="data.train")
    (tmp_path / cached).mkdir(parents=True)
    check_source(source, key="data.train")
    assert is_offline_mode()


def test_a_hub_that_is_not_to_be_asked(
    endpoint: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, so the Hugging Face hub is not as"):
        folder_with_config("nobody/nothing")


def test_a_name_that_is_looked_up_for_ever_takes_seconds(
    endpoint: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(*_: object, **__: object) -> None:
        time.sleep(2)
        raise OSError("no such host")

    monkeypatch.setattr(hub, "_TIMEOUT_S", 0.1)
    monkeypatch.setattr(hub.socket, "create_connection", look_up)
    start_time = time.monotonic()
    with pytest.raises(UserError, match=r"cannot be reached \(no answer in 0.1 s\)"):
        folder_with_config("nobody/nothing")
    assert time.monotonic() - start_time < 2


def test_a_hub_that_answers_is_asked(endpoint: socket.socket) -> None:
    folder_with_config("nobody/nothing")
    assert not is_offline_mode()


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "ALL_PROXY"])
def test_nothing_is_concluded_behind_a_proxy(
    endpoint: socket.socket, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    endpoint.close()
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    folder_with_config("nobody/nothing")
    assert not is_offline_mode()
