"""Two real `vllm serve` processes, by `vapo serve`: `make vllm-server-test`."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch

from tests.builders import free_port
from tests.integration.commands import summary
from tests.integration.test_vllm_fit import (
    assert_same_actor,
    fit,
    options,
    start_fit,
    wait_for_iteration,
)
from tests.rollouts.lying import LIES, LONG, VOCABULARY, lying_proxy
from tests.rollouts.turns_contract import check_logprobs
from tests.tiny_model import save_tiny_folder
from tests.vllm_engine import (
    kill_server,
    make_check,
    make_engine,
    real_servers,
    vllm_model,
)
from vapo.rollouts.engines.contract import SampledTurn, SamplingSettings, TurnRequest
from vapo.rollouts.engines.engine import EngineError, Generated, Request, generate_all
from vapo.rollouts.engines.vllm_server.engine import ServedEngine
from vapo.rollouts.engines.vllm_server.weights import FolderTransfer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(
        tmp_path_factory.mktemp("policy") / "folder", vllm_model(max_position_embeddings=1024)
    )


@pytest.fixture(scope="module")
def ports(policy: Path) -> Iterator[tuple[int, int]]:
    first, second = free_port(), free_port()
    with real_servers(policy, first, second):
        yield first, second


@pytest.fixture(scope="module")
def whole_run(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an engine in its process."""
    return fit(tmp_path_factory.mktemp("whole"), *options(policy))


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
    transfer = FolderTransfer(folder, urls)
    vocabulary = vllm_model().config.vocab_size
    return ServedEngine(urls, transfer, vocab_size=vocabulary, timeout_s=60)


def changed(scale: float) -> Any:
    model = vllm_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(scale)
    return model


def num_tokens(port: int) -> int:
    """How many the server has sampled since its start."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    name = "vllm:generation_tokens_total"
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))


def wait_for_tokens(ports: Sequence[int], num: int) -> None:
    until = time.monotonic() + 60
    while sum(map(num_tokens, ports)) < num:
        assert time.monotonic() < until
        time.sleep(0.01)


def results(engine: ServedEngine, names: Collection[str]) -> dict[str, Generated]:
    found: dict[str, Generated] = {}
    while len(found) < len(names):
        found |= engine.results(names)
    return found


def assert_same_responses(found: Sequence[Generated], expected: Sequence[Generated]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.ids == other.ids
        gaps = [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
        assert max(gaps) < 1e-4


# ---- as in process ----------------------------------------------------------------------------


def test_tokens_and_log_probs_are_those_in_process(
    policy: Path, ports: tuple[int, int], tmp_path: Path
) -> None:
    """Of a batch on two servers, and of two requests alone; some end early, some are filtered."""
    settings = [LONG, SamplingSettings(60, temperature=0.7, top_p=0.9), SamplingSettings(9)]
    requests = [Request((2 + i, 3, 5), i, settings[i % 3], frozenset([1])) for i in range(24)]
    own, engine = make_engine(policy), connect(ports, tmp_path)
    try:
        for each in (own, engine):
            each.load(changed(-0.5).state_dict().items())
        expected = generate_all(own, requests)
        assert_same_responses(generate_all(engine, requests), expected)
        for place in (4, 12):
            assert_same_responses(generate_all(engine, [requests[place]]), [expected[place]])
    finally:
        engine.close()
        own.close()


def test_a_run_is_the_run_in_process(
    policy: Path, whole_run: Path, ports: tuple[int, int], tmp_path: Path
) -> None:
    """The same tokens and, to 1e-6, the same weights after three iterations."""
    assert_same_actor(whole_run, fit(tmp_path, *served(policy, ports)))


# ---- weights ----------------------------------------------------------------------------------


def test_each_part_of_an_open_request_has_its_weights_log_probs(
    ports: tuple[int, int], tmp_path: Path
) -> None:
    """Three pushes while requests are open."""
    models = [changed(scale) for scale in (1.0, -1.0, -0.5, 0.5)]
    engine = connect(ports, tmp_path)
    try:
        engine.load(models[0].state_dict().items())
        settings = SamplingSettings(800)
        requests = {f"r{i}": Request((2 + i, 3), i, settings) for i in range(12)}
        before = sum(map(num_tokens, ports))
        engine.submit(requests)
        for number, model in enumerate(models[1:], start=1):
            wait_for_tokens(ports, before + 600 * number)
            engine.load(model.state_dict().items())
        found = results(engine, requests)
        assert max(len(one.updates) for one in found.values()) == 4, "no request saw all versions"
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


def test_two_runs_on_one_server(policy: Path, ports: tuple[int, int], tmp_path: Path) -> None:
    """A run that pushes no weights in the meantime, and an engine, hear of it."""
    run = start_fit(tmp_path, *served(policy, ports[:1]))
    wait_for_iteration(run, 1)  # of two of value pretraining
    run.send_signal(signal.SIGSTOP)
    one, other = (connect(ports[:1], tmp_path / name) for name in "ab")
    try:
        for engine in (one, other):
            engine.load(vllm_model().state_dict().items())
        with pytest.raises(EngineError, match="another run uses it"):
            generate_all(one, [Request((2, 3), 0, SamplingSettings(8))])
        generate_all(other, [Request((2, 3), 0, SamplingSettings(8))])
    finally:
        one.close()
        other.close()
        run.send_signal(signal.SIGCONT)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 2
    assert f"{urls_of(ports)[0]} samples with weights that this run has not sent" in said
    assert "Traceback" not in said


# ---- wrong answers ----------------------------------------------------------------------------


def test_each_wrong_answer_is_one_line_that_names_the_server(
    ports: tuple[int, int], tmp_path: Path
) -> None:
    with lying_proxy(urls_of(ports)[0]) as proxy:
        transfer = FolderTransfer(tmp_path, [proxy.url])
        engine = ServedEngine([proxy.url], transfer, vocab_size=VOCABULARY, timeout_s=60)
        try:
            engine.load(vllm_model().state_dict().items())
            for name, (change, said) in LIES.items():
                proxy.change = change
                with pytest.raises(EngineError, match=said) as caught:
                    generate_all(engine, [Request((2, 3), 0, LONG)])
                wrong = f"the rollout server {proxy.url} gave a wrong answer: "
                assert str(caught.value).startswith(wrong), name
                assert "\n" not in str(caught.value), name
        finally:
            engine.close()


def test_a_run_that_is_lied_to_ends_in_one_line(
    policy: Path, ports: tuple[int, int], tmp_path: Path
) -> None:
    with lying_proxy(urls_of(ports)[1]) as proxy:
        late, _ = LIES["one log-prob less"]
        proxy.change = lambda answer: answer if proxy.num_answers < 50 else late(answer)
        urls = f"rollouts.servers.urls='{urls_of(ports)[0]},{proxy.url}'"
        run = start_fit(tmp_path, *served(policy, ports), urls)
        _, said = run.communicate(timeout=240)
    assert run.returncode == 2
    assert f"vapo: the rollout server {proxy.url} gave a wrong answer: it has " in said
    assert "Traceback" not in said


# ---- lost servers -----------------------------------------------------------------------------


def test_open_requests_of_a_killed_server_give_the_same_elsewhere(
    policy: Path, ports: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And once it is back it has the new weights, and its share of the requests."""
    port = free_port()
    requests = {f"r{i}": Request((2 + i, 3), i, SamplingSettings(120)) for i in range(24)}
    with real_servers(policy, port) as (process,):
        engine = connect((port, ports[0]), tmp_path)
        engine.load(changed(1.0).state_dict().items())
        expected = generate_all(engine, list(requests.values()))
        before = num_tokens(port)
        engine.submit(requests)
        wait_for_tokens([port], before + 240)
        kill_server(process)
        found = results(engine, requests)
    assert_same_responses([found[name] for name in requests], expected)
    assert "the other servers take over" in capsys.readouterr().err
    try:
        with real_servers(policy, port):
            engine.load(changed(-1.0).state_dict().items())
            make_check(changed(-1.0))(engine, (1,))
            assert num_tokens(port) > 0
            assert generate_all(engine, list(requests.values())) != expected
    finally:
        engine.close()


def test_a_server_that_is_killed_in_a_run_and_comes_back(
    policy: Path, whole_run: Path, ports: tuple[int, int], tmp_path: Path
) -> None:
    """The run goes on with the other one, and ends as if nothing had happened."""
    port = free_port()
    with real_servers(policy, port) as (process,):
        run = start_fit(tmp_path, *served(policy, (port, ports[0])))
        wait_for_iteration(run, 3)
        kill_server(process)
    wait_for_iteration(run, 1)
    run.send_signal(signal.SIGSTOP)  # it would end before the server is back
    with real_servers(policy, port):
        run.send_signal(signal.SIGCONT)
        _, said = run.communicate(timeout=400)
        assert num_tokens(port) > 0, "the last iteration has used it"
    assert run.returncode == 0, said
    assert "the other servers take over" in said
    (found,) = (tmp_path / "runs").iterdir()
    assert_same_actor(whole_run, found)
    assert summary(found)["score_after"] == pytest.approx(
        summary(whole_run)["score_after"], abs=1e-4
    )


def test_a_run_without_servers_ends_in_one_line_and_is_resumed(
    policy: Path, whole_run: Path, ports: tuple[int, int], tmp_path: Path
) -> None:
    port = free_port()
    with real_servers(policy, port) as (process,):
        run = start_fit(tmp_path, *served(policy, (port,)))
        wait_for_iteration(run, 3)
        kill_server(process)
        _, said = run.communicate(timeout=240)
    assert run.returncode == 2
    assert f"the rollout server http://127.0.0.1:{port}" in said
    assert "--ckpt_path last" in said
    assert "Traceback" not in said
    resumed = fit(tmp_path, *served(policy, ports), "--ckpt_path", "last")
    assert_same_actor(whole_run, resumed)
