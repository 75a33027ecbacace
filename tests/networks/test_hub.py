"""A hub that cannot be reached costs no retries: the libraries read their cache."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import huggingface_hub
import pytest
from huggingface_hub.constants import is_offline_mode

from vapo.config.data import HuggingfaceSource
from vapo.networks.hub import read_cache_if_unreachable
from vapo.networks.model_folders import folder_with_config
from vapo.prompts.sources import check_source


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A hub of this machine, in place of the real one; closed, it refuses."""
    listener = socket.create_server(("127.0.0.1", 0))
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    read_cache_if_unreachable.cache_clear()
    yield listener
    listener.close()
    read_cache_if_unreachable.cache_clear()


def test_a_model_of_a_hub_that_refuses(
    endpoint: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.close()
    assert folder_with_config("nobody/nothing") is None
    assert is_offline_mode()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    said = capsys.readouterr().err
    assert "hub (127.0.0.1) cannot be reached" in said
    folder_with_config("nobody/nothing")
    assert capsys.readouterr().err == "", "once"


def test_a_dataset_of_a_hub_that_refuses(endpoint: socket.socket) -> None:
    endpoint.close()
    check_source(HuggingfaceSource(path="nobody/nothing"), key="data.train")
    assert is_offline_mode()


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
