"""Servers with no free connection: ranks share them, and refused requests are sent again."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.rollouts.serving import LIMITS, FakeEngine, connect, serving, url
from tests.rollouts.test_remote_turns import END_IDS, Served, collect, numbered, until
from tests.rollouts.turns_contract import SETTINGS
from vapo.rollouts.engines import remote as remote_module
from vapo.rollouts.engines.engine import EngineError
from vapo.rollouts.engines.remote import RemoteEngine


def test_ranks_that_share_a_server_share_its_connections(monkeypatch):
    """Three ranks have together as many as one: the server takes 128 and refuses more."""
    with ExitStack() as stack:
        server = Served(stack)
        server.engine.resume.clear()
        monkeypatch.setattr(remote_module, "world_size", lambda: 3)
        ranks = []
        for rank in range(3):
            monkeypatch.setattr(remote_module, "rank", lambda rank=rank: rank)
            ranks.append(RemoteEngine([server.url], timeout_s=20))
        for engine in ranks:
            for name, request in numbered(50).items():
                engine.submit({name: request}, SETTINGS, end_ids=END_IDS)
        until(lambda: len(server.engine.open) >= 48)
        assert [engine.results(["r0"]) for engine in ranks] == [{}, {}, {}]
        assert len(server.engine.open) == 48
        server.engine.resume.set()
        for engine in ranks:
            assert len(collect(engine, numbered(50))) == 50


def test_requests_that_a_full_server_refuses_are_sent_again():
    engine = FakeEngine()
    engine.resume.clear()
    with serving(engine, limits=replace(LIMITS, connections=2)) as server:
        remote = RemoteEngine([url(server)], timeout_s=20)
        requests = numbered(6)
        for name, request in requests.items():
            remote.submit({name: request}, SETTINGS, end_ids=END_IDS)
        until(lambda: len(engine.open) == 2)
        assert remote.results(requests) == {}
        remote.abort(["r5"])
        engine.resume.set()
        left = [f"r{seed}" for seed in range(5)]
        assert {name: g.ids for name, g in collect(remote, left).items()} == {
            f"r{seed}": (seed,) for seed in range(5)
        }


def test_a_server_that_stays_full_is_lost():
    with serving(FakeEngine(), limits=replace(LIMITS, connections=1)) as server:
        start = time.monotonic()
        with (
            connect(server),
            pytest.raises(EngineError, match=r"no free connection .* 0\.5 s .*timeout_s"),
        ):
            RemoteEngine([url(server)], timeout_s=0.5)
        assert 0.5 < time.monotonic() - start < 5
