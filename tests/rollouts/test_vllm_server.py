"""`vapo rollout-server` and its client: the same responses and weights, and its failures."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollouts.playing import sample_all
from tests.rollouts.sampler_contract import ids_of, largest_gap
from tests.tiny_model import ragged_prompts, save_tiny_folder
from tests.tiny_model import sample as sample_with_transformers
from tests.vllm_engine import make_vllm_sampler, real_server, vllm_model
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import EngineError, Request, sampled
from vapo.rollouts.engines.remote import RemoteEngine


@contextmanager
def scripted(*lines: bytes) -> Iterator[str]:
    """A server that answers /info, and every POST with these lines."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, *lines: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.writelines(lines)

        def do_GET(self) -> None:
            self.answer(b'{"max_tokens": 64, "has_weights": true}\n')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(*lines)

        def log_message(self, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def generate(engine: RemoteEngine, num: int) -> Any:
    requests = [Request((2, 3), seed) for seed in range(num)]
    return sampled(engine, requests, SamplingSettings(4), end_ids=frozenset([1]))


@contextmanager
def at_first_results(engine: RemoteEngine, call: Callable[[], None]) -> Iterator[None]:
    """Call this when the first results have come."""
    results = engine.results

    def once(names: Any) -> Any:
        if found := results(names):
            engine.results = results  # type: ignore[method-assign]
            call()
        return found

    engine.results = once  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.results = results  # type: ignore[method-assign]


def test_shares_come_back_in_order_and_progress_adds_up() -> None:
    first = (  # the second response is done before the first
        b'{"responses": [[1, [6, 1], [-1.0, -2.0]]]}\n',
        b'{"responses": []}\n',
        b'{"responses": [[0, [5], [-0.5]]]}\n',
        b'{"generated": 2}\n',
    )
    second = b'{"responses": [[0, [7], [-0.1]]]}\n', b'{"generated": 1}\n'
    with scripted(*first) as a, scripted(*second) as b:
        generated = generate(RemoteEngine([a, b], timeout_s=5), 3)
    assert [result.ids for result in generated] == [(5,), (6, 1), (7,)]
    assert generated[1].logprobs == (-1.0, -2.0)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([b'{"responses": [[0, [5], [-0.5]]]}\n', b'{"generated": 1}\n'], "1 of 2 responses"),
        ([b'{"responses": [[0, [5], [-0.5]]]}\n'], "ended early"),
        ([b'{"error": "out of memory"}\n'], "out of memory"),
        ([b"oops\n"], "does not answer"),
    ],
)
def test_never_a_part_of_the_batch(lines: list[bytes], said: str) -> None:
    with scripted(*lines) as url, pytest.raises(EngineError, match=said):
        generate(RemoteEngine([url], timeout_s=5), 2)


def test_nobody_there() -> None:
    with pytest.raises(EngineError, match=r"is `vapo rollout-server` running there"):
        RemoteEngine(["http://127.0.0.1:9"], timeout_s=5)


# ---- a real server --------------------------------------------------------------------------


@pytest.mark.vllm
def test_weights_responses_hangs_and_death(tmp_path: Path) -> None:
    """One server for all, as starting it takes the time."""
    model = vllm_model()
    prompts = ragged_prompts(6)
    with real_server(save_tiny_folder(tmp_path / "policy", model)) as (url, process):
        engine = RemoteEngine([url], timeout_s=60)
        with pytest.raises(EngineError, match="no weights yet"):
            generate(engine, 1)
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(-1)
        sampler = make_vllm_sampler(engine, model)
        settings = SamplingSettings(32, greedy=True)
        greedy = sample_all(sampler, prompts, group_size=1, settings=settings, seed=0)
        expected = sample_with_transformers(model, prompts, group_size=1, greedy=True)
        assert ids_of(greedy) == ids_of(expected)
        drawn = sample_all(sampler, prompts, group_size=4, settings=SamplingSettings(32), seed=3)
        assert largest_gap(model, drawn) < 1e-4
        again = sample_all(sampler, prompts, group_size=4, settings=SamplingSettings(32), seed=3)
        assert ids_of(again) == ids_of(drawn)
        with pytest.raises(EngineError, match="max_logprob_gap"):
            sampler.sync((n, t * 1.05) for n, t in model.state_dict().items())

        process.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineError, match="no token for 2 s"):
            RemoteEngine([url], timeout_s=2)
        process.send_signal(signal.SIGCONT)
        sampler.sync(model.state_dict().items())
        again = sample_all(sampler, prompts, group_size=4, settings=SamplingSettings(32), seed=3)
        assert ids_of(again) == ids_of(drawn)

        def leave() -> None:
            raise KeyboardInterrupt

        long = [Request((2, 3, 4), seed) for seed in range(256)]
        with pytest.raises(KeyboardInterrupt), at_first_results(engine, leave):
            sampled(engine, long, SamplingSettings(100), end_ids=frozenset([1]))
        again = sample_all(sampler, prompts, group_size=4, settings=SamplingSettings(32), seed=3)
        assert ids_of(again) == ids_of(drawn)

        long = [Request((2, 3, 4), seed) for seed in range(256)]

        start = time.monotonic()
        with (
            pytest.raises(EngineError, match="rollout server"),
            at_first_results(engine, process.kill),
        ):
            sampled(engine, long, SamplingSettings(100), end_ids=frozenset([1]))
        assert time.monotonic() - start < 60
