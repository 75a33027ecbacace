"""`vapo serve`: the command that it becomes."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.config.fits import ON_STATE_TRACKING
from vapo.cli import main
from vapo.commands import serve

pytestmark = pytest.mark.usefixtures("in_the_repository")

SERVED = [
    *ON_STATE_TRACKING,
    "rollouts.engine=vllm_server",
    "rollouts.servers.urls=http://127.0.0.1:8100",
    "trainer.accelerator=cpu",
]


def printed(capsys: Any, *options: str) -> dict[str, str | None]:
    """The flags of the printed command, and its variables."""
    assert main(["serve", *SERVED, "--print_command", *options]) == 0
    words = shlex.split(capsys.readouterr().out)
    start = words.index(sys.executable)
    module = "vllm.entrypoints.openai.api_server"
    assert words[start : start + 4] == [sys.executable, "-P", "-m", module]
    found: dict[str, str | None] = {}
    for word in words[:start]:
        name, _, found[name] = word.partition("=")
    rest = words[start + 4 :]
    for word, after in zip(rest, [*rest[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = None if after.startswith("--") else after
    return found


def test_the_command_has_what_a_trainer_needs_of_the_server(capsys: Any) -> None:
    found = printed(capsys)
    assert found["VLLM_SERVER_DEV_MODE"] == "1", "else there are no routes for weights"
    assert (found["--host"], found["--port"]) == ("127.0.0.1", "8100")
    assert found["--logprobs-mode"] == "processed_logprobs"
    assert found["--weight-transfer-config"] == '{"backend": "vapo_folder"}'
    assert found["--load-format"] == "dummy"
    for flag in ("--enable-scale-out", "--enforce-eager", "--skip-tokenizer-init"):
        assert found[flag] is None
    assert not any("disable-log-stats" in flag for flag in found), "the trainer reads them"
    assert "--no-trust-remote-code" in found


def test_no_sampler_needs_nvcc_unless_the_user_asks_for_one(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    assert printed(capsys)["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    assert printed(capsys)["VLLM_USE_FLASHINFER_SAMPLER"] == "1"


def test_the_engine_has_room_for_the_longest_prompt_and_response(capsys: Any) -> None:
    found = printed(capsys, "data.max_prompt_tokens=40", "rollouts.max_response_tokens=60")
    assert found["--max-model-len"] == "100"


def test_the_configs_own_options_are_flags(capsys: Any) -> None:
    options = [
        "rollouts.servers.weights=nccl",
        "rollouts.servers.tensor_parallel_size=2",
        "rollouts.servers.engine_args.block_size=32",
        "rollouts.max_concurrent_sequences=7",
        "--port",
        "8123",
    ]
    found = printed(capsys, *options)
    assert found["--weight-transfer-config"] == '{"backend": "nccl"}'
    assert found["--tensor-parallel-size"] == "2"
    assert found["--block-size"] == "32"
    assert found["--max-num-seqs"] == "7"
    assert found["--port"] == "8123"


def test_heads_that_a_cpu_has_no_kernel_for_are_padded(capsys: Any) -> None:
    """models/state_tracking has heads of 24; the server's backend pads the weights as well."""
    overrides = json.loads(str(printed(capsys)["--hf-overrides"]))
    assert (overrides["vapo_head_size"], overrides["head_dim"]) == (24, 32)


def test_another_engine_has_no_server(capsys: Any) -> None:
    assert main(["serve", *ON_STATE_TRACKING, "rollouts.engine=vllm"]) == 2
    assert "starts a server for rollouts.engine=vllm_server" in capsys.readouterr().err


def test_it_becomes_the_server_and_says_who_can_reach_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    became: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(serve.os, "execve", lambda *arguments: became.append(arguments))
    monkeypatch.setattr(serve, "check_options", lambda options: None)
    monkeypatch.setattr(serve, "check_port", lambda host, port, fix: None)
    assert main(["serve", *SERVED]) == 0
    said = capsys.readouterr().err
    assert "starting vLLM's server on 127.0.0.1:8100" in said
    assert "change its weights" not in said
    assert main(["serve", *SERVED, "--host", "0.0.0.0"]) == 0
    assert "whoever reaches 0.0.0.0:8100 can use the engine" in capsys.readouterr().err
    assert [path for path, *_ in became] == [sys.executable] * 2
    assert became[0][2]["VLLM_SERVER_DEV_MODE"] == "1"
