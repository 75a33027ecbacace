"""Two real `vllm serve` processes, by `vapo serve`: `make vllm-server-test`."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.commands import summary
from tests.integration.test_vllm_fit import (
    assert_same_actor,
    fit,
    options,
    start_fit,
    wait_for_iteration,
)
from tests.rollouts.turns_contract import check_logprobs
from tests.tiny_model import save_tiny_folder
from tests.vllm_engine import MAX_TOKENS, kill_server, make_check, real_server, vllm_model
from vapo.rollouts.engines.contract import SampledTurn, SamplingSettings, TurnRequest
from vapo.rollouts.engines.engine import EngineError, Generated, Request, sampled
from vapo.rollouts.engines.vllm_server.engine import ServedEngine
from vapo.rollouts.engines.vllm_server.weights import FolderTransfer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("policy") / "folder", vllm_model())


@pytest.fixture(scope="module")
def ports(policy: Path) -> Iterator[tuple[int, int]]:
    first, second = free_port(), free_port()
    with real_server(policy, first), real_server(policy, second):
        yield first, second


def urls_of(ports: tuple[int, ...]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in ports]


def served(policy: Path, ports: tuple[int, ...]) -> list[str]:
    return [
        f"actor.path={policy}",
        "critic.init=policy",
        "rollouts.engine=vllm_server",
        f"rollouts.servers.urls='{','.join(urls_of(ports))}'",
        "rollouts.max_concurrent_sequences=64",
    ]


def connect(ports: tuple[int, ...], folder: Path) -> ServedEngine:
    urls = urls_of(ports)
    transfer = FolderTransfer(folder, urls, torch.float32)
    vocabulary = vllm_model().config.vocab_size
    return ServedEngine(urls, transfer, vocab_size=vocabulary, timeout_s=60)


def changed(scale: float) -> Any:
    model = vllm_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(scale)
    return model


def test_a_run_is_the_run_in_process(policy: Path, ports: tuple[int, int], tmp_path: Path) -> None:
    """The same tokens and, to 1e-5, the same weights after three iterations."""
    own = fit(tmp_path / "own", *options(policy))
    assert_same_actor(own, fit(tmp_path / "served", *served(policy, ports)))


def test_each_part_of_an_open_request_has_its_weights_log_probs(
    ports: tuple[int, int], tmp_path: Path
) -> None:
    models = [changed(scale) for scale in (1.0, -1.0, -0.5, 0.5)]
    engine = connect(ports, tmp_path)
    try:
        engine.load(models[0].state_dict().items())
        settings = SamplingSettings(MAX_TOKENS - 2)
        requests = {f"r{i}": Request((2 + i, 3), i, settings) for i in range(12)}
        engine.submit(requests)
        for model in models[1:]:
            time.sleep(0.15)
            engine.load(model.state_dict().items())
        found: dict[str, Generated] = {}
        while len(found) < len(requests):
            found |= engine.results(requests)
        assert max(len(one.updates) for one in found.values()) > 1, "no request saw two versions"
        for name, one in found.items():
            place = 0
            for updates, num in one.updates:
                ids = (*requests[name].prompt_ids, *one.ids[:place])
                end = place + num
                part = TurnRequest((0, 0), 0, ids, num)
                turn = SampledTurn(part, one.ids[place:end], one.logprobs[place:end], False)
                check_logprobs(models[updates], turn)
                place = end
        make_check(models[-1])(engine, (1,))
    finally:
        engine.close()


def test_two_runs_on_one_server(ports: tuple[int, int], tmp_path: Path) -> None:
    one, other = (connect(ports[:1], tmp_path / name) for name in "ab")
    try:
        for engine in (one, other):
            engine.load(vllm_model().state_dict().items())
        with pytest.raises(EngineError, match="another run uses it"):
            sampled(one, [Request((2, 3), 0, SamplingSettings(8))])
        sampled(other, [Request((2, 3), 0, SamplingSettings(8))])
    finally:
        one.close()
        other.close()


def test_a_server_that_is_killed_in_a_run_and_comes_back(
    policy: Path, ports: tuple[int, int], tmp_path: Path
) -> None:
    """The run goes on with the other one, and ends as if nothing had happened."""
    expected = fit(tmp_path / "own", *options(policy))
    port = free_port()
    with real_server(policy, port) as process:
        run = start_fit(tmp_path, *served(policy, (port, ports[0])))
        wait_for_iteration(run, 3)
        kill_server(process)
        wait_for_iteration(run, 4)
        with real_server(policy, port):
            _, said = run.communicate(timeout=400)
    assert run.returncode == 0, said
    assert "the other servers take over" in said
    (found,) = (tmp_path / "runs").iterdir()
    assert_same_actor(expected, found)
    assert summary(found)["score_after"] == pytest.approx(
        summary(expected)["score_after"], abs=1e-4
    )


def test_a_run_without_servers_ends_in_one_line_and_is_resumed(
    policy: Path, ports: tuple[int, int], tmp_path: Path
) -> None:
    expected = fit(tmp_path / "own", *options(policy))
    port = free_port()
    with real_server(policy, port) as process:
        run: subprocess.Popen[str] = start_fit(tmp_path, *served(policy, (port,)))
        wait_for_iteration(run, 3)
        kill_server(process)
        _, said = run.communicate(timeout=240)
    assert run.returncode == 2
    assert f"the rollout server http://127.0.0.1:{port}" in said
    assert "--ckpt_path last" in said
    assert "Traceback" not in said
    resumed = fit(tmp_path, *served(policy, ports), "--ckpt_path", "last")
    assert_same_actor(expected, resumed)
