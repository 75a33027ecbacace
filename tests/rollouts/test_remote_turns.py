"""Turns on rollout servers: several at a time, weights in between, and servers that are lost."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
import torch

from tests.rollouts.playing import sample_all
from tests.rollouts.sampler_contract import ids_of
from tests.rollouts.serving import LIMITS, FakeEngine, serving, url
from tests.rollouts.test_engine_turns import engine_of
from tests.rollouts.turns_contract import (
    SETTINGS,
    TurnContract,
    first_requests,
    next_request,
    play,
)
from tests.rollouts.turns_contract import ids_of as turn_ids
from tests.tiny_model import ragged_prompts, sample, save_tiny_folder, tiny_model
from tests.vllm_engine import make_vllm_sampler, real_server
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import EngineError, Generated, Request, sampled
from vapo.rollouts.engines.remote import RemoteEngine
from vapo.rollouts.engines.server import EngineServer
from vapo.rollouts.engines.server_requests import Limits

ROOM = Limits(weights_bytes=1 << 24)
END_IDS = frozenset([1])


@contextmanager
def served(engine) -> Iterator[str]:
    engine.resume = threading.Event()
    with serving(engine, limits=ROOM) as server:
        yield url(server)


class TestTurns(TurnContract):
    """The Transformers engine behind HTTP."""

    @pytest.fixture(scope="class")
    def model(self):
        return tiny_model()

    @pytest.fixture
    def turn_sampler(self):
        with ExitStack() as stack:

            def make(model, rows):
                address = stack.enter_context(served(engine_of(model, rows)))
                return make_vllm_sampler(RemoteEngine([address], timeout_s=20), model)

            yield make


def test_responses_are_the_trainers_own_engines():
    model = tiny_model()
    prompts = ragged_prompts(6)
    settings = SamplingSettings(max_response_tokens=32)
    with served(engine_of(model, 4)) as first, served(engine_of(model, 4)) as second:
        sampler = make_vllm_sampler(RemoteEngine([first, second], timeout_s=20), model)
        rollouts = sample_all(sampler, prompts, group_size=4, settings=settings, seed=7)
    assert ids_of(rollouts) == ids_of(sample(model, prompts))


@pytest.mark.attacks  # test_servers_fit.py has a server of the command that nobody kills
def test_the_command_serves_the_transformers_engine(tmp_path):
    """Killed in the middle of turns it is lost; another takes over with the same tokens."""
    model = tiny_model()
    folder = save_tiny_folder(tmp_path / "policy")
    with (
        real_server(folder, "transformers") as (first, process),
        real_server(folder, "transformers") as (second, _),
    ):
        remote = RemoteEngine([first, second], timeout_s=20)
        with pytest.raises(EngineError, match="no weights yet"):
            sampled(remote, [Request((2, 3), 1)], SETTINGS, end_ids=END_IDS)
        sampler = make_vllm_sampler(remote, model)
        with sampler.turns(SETTINGS, seed=7) as stream:
            for request in first_requests(6):
                stream.submit(request)
            begun = stream.step()
            process.kill()
            process.wait()
            for turn in begun:
                stream.submit(next_request(turn))
            found = turn_ids(play(stream, [], num=3))
        with sampler.turns(SETTINGS, seed=7) as stream:
            again = turn_ids(play(stream, first_requests(6), num=3))
    assert {(r.key, 2) for r in first_requests(6)} <= found.keys()
    assert found.items() <= again.items()


# ---- servers that are lost ----------------------------------------------------------------------


class Served:
    """A server over a double of the engine, which can be lost in several ways."""

    def __init__(self, stack: ExitStack) -> None:
        self.engine = FakeEngine()
        self.server: EngineServer = stack.enter_context(serving(self.engine, limits=LIMITS))
        self.url = url(self.server)

    def refuse(self) -> None:
        """No new connection is taken, and those that are open end."""
        self.server.shutdown()
        self.server.server_close()


def two(stack: ExitStack, timeout_s: float = 20) -> tuple[list[Served], RemoteEngine]:
    servers = [Served(stack) for _ in range(2)]
    return servers, RemoteEngine([server.url for server in servers], timeout_s=timeout_s)


def numbered(num: int) -> dict[str, Request]:
    return {f"r{seed}": Request((2, 3), seed, episode=f"e{seed}") for seed in range(num)}


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def collect(engine: RemoteEngine, names) -> dict[str, Generated]:
    found, deadline = dict[str, Generated](), time.monotonic() + 20
    while len(found) < len(names):
        assert time.monotonic() < deadline
        found.update(engine.results(names))
    return found


def test_requests_of_a_server_that_hangs_go_to_the_others(capfd, monkeypatch):
    with ExitStack() as stack:
        servers, remote = two(stack, timeout_s=1.5)
        hung = threading.Event()
        stack.callback(hung.set)

        def hang() -> dict[int, object]:
            hung.wait(20)
            return {}

        monkeypatch.setattr(servers[0].engine, "_step", hang)
        requests = numbered(6)
        remote.submit(requests, SETTINGS, end_ids=END_IDS)
        found = collect(remote, requests)
        assert {name: result.ids for name, result in found.items()} == {
            f"r{seed}": (seed,) for seed in range(6)
        }
        assert len(servers[1].engine.threads) == 1
        said = capfd.readouterr().err
        assert f"{servers[0].url} has given no token for 1.5 s" in said
        assert "the other servers take over" in said
        # It gets no more: else this would wait again.
        start = time.monotonic()
        more = {f"later {name}": request for name, request in numbered(4).items()}
        remote.submit(more, SETTINGS, end_ids=END_IDS)
        assert len(collect(remote, more)) == 4
        assert time.monotonic() - start < 1.5


def test_a_server_that_refuses_connections(capfd):
    with ExitStack() as stack:
        servers, remote = two(stack)
        first = numbered(4)
        remote.submit(first, SETTINGS, end_ids=END_IDS)
        collect(remote, first)
        servers[0].refuse()
        until(lambda: not answers(servers[0]))
        again = {f"again {name}": request for name, request in first.items()}
        remote.submit(again, SETTINGS, end_ids=END_IDS)
        assert len(collect(remote, again)) == 4
        assert f"{servers[0].url} does not answer" in capfd.readouterr().err
        remote.load([("w", torch.ones(2))])
        weights = [server.engine.weights for server in servers]
        assert weights[0] == {}
        assert weights[1] is not None
        assert weights[1]["w"].tolist() == [1, 1]


def test_a_server_that_is_lost_before_the_weights_are_sent():
    with ExitStack() as stack:
        servers, remote = two(stack)
        servers[1].refuse()
        until(lambda: not answers(servers[1]))
        remote.load([("w", torch.ones(2))])
        assert len(sampled(remote, list(numbered(3).values()), SETTINGS, end_ids=END_IDS)) == 3
        assert servers[0].engine.weights


def test_without_any_server_the_error_comes():
    with ExitStack() as stack:
        servers, remote = two(stack)
        for server in servers:
            server.refuse()
        until(lambda: not any(map(answers, servers)))
        with pytest.raises(EngineError, match="is `vapo rollout-server` running there"):
            sampled(remote, [Request((2, 3), 1)], SETTINGS, end_ids=END_IDS)


def test_the_engines_own_error_is_not_tried_elsewhere():
    with ExitStack() as stack:
        servers, remote = two(stack)
        servers[0].engine.fails_at = 0
        with pytest.raises(EngineError, match="out of memory"):
            sampled(remote, list(numbered(4).values()), SETTINGS, end_ids=END_IDS)


def test_turns_of_an_episode_go_to_one_server(monkeypatch):
    model = tiny_model()
    engines = [engine_of(model, 4) for _ in range(2)]
    asked: list[set[str]] = [set(), set()]
    for engine, seen in zip(engines, asked, strict=True):
        submit = engine.submit

        def noted(requests, settings, *, end_ids, submit=submit, seen=seen):
            seen.update(request.episode for request in requests.values() if request.episode)
            submit(requests, settings, end_ids=end_ids)

        monkeypatch.setattr(engine, "submit", noted)
    with served(engines[0]) as first, served(engines[1]) as second:
        sampler = make_vllm_sampler(RemoteEngine([first, second], timeout_s=20), model)
        with sampler.turns(SETTINGS, seed=7) as stream:
            found = turn_ids(play(stream, first_requests(4)))
    assert asked[0]
    assert asked[1]
    assert not asked[0] & asked[1]
    direct = make_vllm_sampler(engine_of(model, 4), model)
    with direct.turns(SETTINGS, seed=7) as stream:
        assert turn_ids(play(stream, first_requests(4))) == found


def test_a_turn_that_is_forgotten_is_dropped_on_the_server():
    with ExitStack() as stack:
        server = Served(stack)
        remote = RemoteEngine([server.url], timeout_s=20)
        server.engine.resume.clear()
        requests = numbered(2)
        remote.submit(requests, SETTINGS, end_ids=END_IDS)
        until(lambda: len(server.engine.open) == 2)
        remote.abort(["r0", "r1"])
        until(lambda: len(server.engine.dropped) == 2)


def answers(server: Served) -> bool:
    address = server.url.removeprefix("http://")
    with closing(http.client.HTTPConnection(address, timeout=1)) as client:
        try:
            client.request("GET", "/info")
            client.getresponse()
        except OSError:
            return False
        return True
