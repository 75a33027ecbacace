"""`vllm serve` processes as the engine, on stand-ins: weights, versions, lost and lying servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollouts.lying import LIES, LONG, VOCABULARY, in_choice, lie
from tests.rollouts.stand_in_server import MAX_TOKENS, StandInServer, stand_ins
from tests.rollouts.turns_contract import (
    SETTINGS,
    TurnContract,
    check_logprobs,
    first_requests,
    play,
)
from tests.rollouts.turns_contract import ids_of as turn_ids
from tests.tiny_model import tiny_model
from tests.vllm_engine import make_vllm_sampler
from vapo.errors import UserError
from vapo.rollouts.engines.contract import (
    NonFiniteLogitsError,
    SampledTurn,
    SamplingSettings,
    TurnRequest,
)
from vapo.rollouts.engines.engine import EngineError, Generated, Request, generate_all
from vapo.rollouts.engines.sampler import CastWeights, EngineSampler, EngineTurns
from vapo.rollouts.engines.vllm_server import engine as engine_module
from vapo.rollouts.engines.vllm_server import server as server_module
from vapo.rollouts.engines.vllm_server.engine import ServedEngine
from vapo.rollouts.engines.vllm_server.weights import FolderTransfer, SyncClient, chunks


def connect(servers: list[StandInServer], folder: Path, *, timeout_s: float = 20) -> ServedEngine:
    urls = [server.url for server in servers]
    transfer = FolderTransfer(folder, urls)
    return ServedEngine(urls, transfer, vocab_size=VOCABULARY, timeout_s=timeout_s)


@contextmanager
def connected(
    servers: list[StandInServer], folder: Path, *, model: Any = None, **options: Any
) -> Iterator[ServedEngine]:
    """An engine over the servers, with the model's weights unless it is None."""
    engine = connect(servers, folder, **options)
    try:
        if model is not None:
            engine.load(model.state_dict().items())
        yield engine
    finally:
        engine.close()


def generate(
    engine: ServedEngine, num: int = 8, settings: SamplingSettings = LONG
) -> list[Generated]:
    return generate_all(engine, [Request((2 + seed, 3), seed, settings) for seed in range(num)])


def other_model(scale: float = -1.0) -> Any:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(scale)
    return model


class TestTurns(TurnContract):
    """Over HTTP, on two servers, with weights that came as files."""

    @pytest.fixture(scope="class")
    def model(self) -> Any:
        """It ends some responses early."""
        model = tiny_model()
        with torch.no_grad():
            model.model.embed_tokens.weight[1] *= 3
        return model

    @pytest.fixture
    def turn_sampler(self, tmp_path: Path) -> Iterator[Any]:
        engines = []
        with stand_ins(2) as servers:

            def make(model: Any, rows: int) -> EngineSampler:
                engines.append(connect(servers, tmp_path))
                return make_vllm_sampler(engines[-1], model)

            yield make
            for engine in engines:
                engine.close()


@pytest.mark.slow
def test_a_batch_beside_an_open_stream_and_a_stream_that_ends_early(tmp_path: Path) -> None:
    """Each takes its own results, whoever steps, and leaves nothing behind."""
    with stand_ins() as servers, connected(servers, tmp_path, model=tiny_model()) as engine:
        expected = generate(engine, 4)
        stream = EngineTurns(engine, SETTINGS, seed=7, end_ids=frozenset([1]))
        wanted = turn_ids(play(stream, first_requests(3)))
        for request in first_requests(3):
            stream.submit(request)
        stream.step()
        assert generate(engine, 4) == expected
        stream.drop()
        assert engine.results(["any"]) == {}
        assert turn_ids(play(stream, first_requests(3))) == wanted


@pytest.mark.slow
def test_the_tokens_do_not_depend_on_the_number_of_servers(tmp_path: Path) -> None:
    found = []
    for num in (1, 3):
        with stand_ins(num) as servers, connected(servers, tmp_path, model=tiny_model()) as engine:
            found.append(generate(engine))
            assert all(server.num_requests for server in servers)
    assert found[0] == found[1]
    assert engine.max_tokens == MAX_TOKENS


def test_weights_go_to_all_servers_and_only_the_newest_files_stay(tmp_path: Path) -> None:
    with stand_ins(2) as servers, connected(servers, tmp_path, model=tiny_model()) as engine:
        first = {server.version for server in servers}
        engine.load(other_model().state_dict().items())
        (second,) = {server.version for server in servers}
        assert len(first) == 1
        assert second not in first
        assert [path.name for path in tmp_path.glob("*/*")] == [second]
        for server in servers:
            assert server.told.count("/init_weight_transfer_engine") == 1
            assert server.told[-5:] == [
                "/pause",
                "/start_weight_update",
                "/update_weights",
                "/finish_weight_update",
                "/resume",
            ]
            for name, tensor in other_model().state_dict().items():
                torch.testing.assert_close(server.model.state_dict()[name], tensor)
    assert list(tmp_path.iterdir()) == []


def test_weights_are_cut_into_files_and_rounded_to_the_engines_dtype() -> None:
    weights = [("a", torch.ones(6, 2).T / 3), ("b", torch.ones(4)), ("n", torch.arange(3))]
    found = list(chunks(CastWeights(torch.bfloat16)(weights), max_bytes=24))
    assert [list(chunk) for chunk in found] == [["a"], ["b", "n"]]
    assert found[0]["a"].is_contiguous()
    assert (found[0]["a"].dtype, found[1]["n"].dtype) == (torch.bfloat16, torch.int64)
    assert found[0]["a"][0, 0] == torch.tensor(1 / 3).bfloat16()


@pytest.mark.slow
def test_each_token_has_the_version_of_its_weights(tmp_path: Path) -> None:
    """Three pushes while requests are open; each part has the log-probs of its own weights."""
    models = [tiny_model(), other_model(), other_model(-0.5), other_model(0.5)]
    with stand_ins(2) as servers, connected(servers, tmp_path, model=models[0]) as engine:
        requests = {f"r{i}": Request((2 + i, 3), i, SamplingSettings(120)) for i in range(6)}
        engine.submit(requests)
        for number, model in enumerate(models[1:], start=1):
            # of each server: one that is slow would otherwise have no token of these weights
            while min(server.num_tokens for server in servers) < 20 * number:
                time.sleep(0.005)
            engine.load(model.state_dict().items())
        found: dict[str, Generated] = {}
        while len(found) < len(requests):
            found |= engine.results(requests)
    assert {len(one.updates) for one in found.values()} == {4}
    for name, one in found.items():
        place = 0
        for updates, num in one.updates:
            ids = (*requests[name].prompt_ids, *one.ids[:place])
            part = TurnRequest((0, 0), 0, ids, num)
            end = place + num
            turn = SampledTurn(part, one.ids[place:end], one.logprobs[place:end], False)
            check_logprobs(models[updates], turn)
            place = end
        assert place == len(one.ids)


# ---- what may go wrong ------------------------------------------------------------------------


def test_nobody_there(tmp_path: Path) -> None:
    transfer = FolderTransfer(tmp_path, [])
    with pytest.raises(EngineError, match=r"127.0.0.1:9 does not answer.*`vapo serve`"):
        ServedEngine(["http://127.0.0.1:9"], transfer, vocab_size=9, timeout_s=5)


def test_a_server_without_the_routes_for_weights(tmp_path: Path) -> None:
    with (
        stand_ins(has_routes_for_weights=False) as servers,
        pytest.raises(EngineError, match="no such route; start it with `vapo serve`"),
    ):
        connect(servers, tmp_path)


@pytest.mark.slow
def test_a_server_without_weights_of_this_run(tmp_path: Path) -> None:
    """Its own random ones are not sampled from: it counts as lost, here as the last."""
    with (
        stand_ins() as servers,
        connected(servers, tmp_path) as engine,
        pytest.raises(EngineError, match="started again, without weights"),
    ):
        generate(engine)


@pytest.mark.slow
def test_a_lost_servers_requests_go_to_the_others_and_it_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tiny_model(), other_model()
    with stand_ins(2) as servers, connected(servers, tmp_path, model=first) as engine:
        expected = generate(engine)
        requests = {f"r{i}": Request((2 + i, 3), i, LONG) for i in range(8)}
        for server in servers:
            server.seconds_per_token = 0.01
        engine.submit(requests)
        while not servers[0].num_tokens:
            time.sleep(0.005)
        servers[0].stop()
        for server in servers:
            server.seconds_per_token = 0.0
        found: dict[str, Generated] = {}
        while len(found) < len(requests):
            found |= engine.results(requests)
        assert [found[name] for name in requests] == expected
        assert "does not answer" in capsys.readouterr().err
        engine.load(second.state_dict().items())  # it is still away
        servers[0].start()
        num = servers[0].num_requests
        generate(engine)
        assert servers[0].num_requests == num
        engine.load(first.state_dict().items())
        assert servers[0].version == servers[1].version
        assert generate(engine) == expected
        assert servers[0].num_requests > num
        servers[0].stop()
        servers[1].stop()
        with pytest.raises(EngineError, match="does not answer"):
            generate(engine)


def test_a_busy_server_is_not_lost_at_a_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one that was lost already has to answer at once."""
    monkeypatch.setattr(server_module, "_LOST_S", 0.05)
    with stand_ins(2) as servers, connected(servers, tmp_path, model=tiny_model()) as engine:
        servers[0].health_s = 0.3
        engine.load(other_model().state_dict().items())
        assert servers[0].version == servers[1].version != "default"


@pytest.mark.slow
def test_a_server_that_was_started_again_between_two_pushes_is_not_sampled_from(
    tmp_path: Path,
) -> None:
    with stand_ins(2) as servers, connected(servers, tmp_path, model=tiny_model()) as engine:
        expected = generate(engine)
        servers[1].stop()
        servers[1].start()
        assert generate(engine) == expected
        engine.load(tiny_model().state_dict().items())
        assert servers[1].version != "default"


@pytest.mark.slow
def test_a_server_that_hangs_is_lost(tmp_path: Path) -> None:
    with (
        stand_ins(2) as servers,
        connected(servers, tmp_path, model=tiny_model(), timeout_s=0.5) as engine,
    ):
        expected = generate(engine)
        servers[0].is_stuck = True
        started = time.monotonic()
        assert generate(engine) == expected
        assert 0.5 <= time.monotonic() - started < 60
        servers[1].is_stuck = True
        with pytest.raises(
            EngineError, match=r"no token for 0\.5 s .*rollouts\.servers\.timeout_s"
        ):
            generate(engine)


@pytest.mark.attacks
def test_long_responses_are_no_hang(tmp_path: Path) -> None:
    """Tokens come all the time, and no answer for far longer than the limit."""
    with (
        stand_ins() as servers,
        connected(servers, tmp_path, model=tiny_model(), timeout_s=1.5) as engine,
    ):
        servers[0].seconds_per_token = 0.06
        started = time.monotonic()
        generate(engine, 1)
        assert time.monotonic() - started > 3.0


@pytest.mark.slow
def test_two_runs_on_one_server(tmp_path: Path) -> None:
    """The next answer says so, whichever run it is of."""
    with stand_ins() as servers, connected(servers, tmp_path / "a", model=tiny_model()) as one:
        generate(one)
        with connected(servers, tmp_path / "b", model=other_model()) as other:
            with pytest.raises(EngineError, match="another run uses it"):
                generate(one)
            generate(other)


def test_dropped_requests_end_on_the_server(tmp_path: Path) -> None:
    with stand_ins() as servers, connected(servers, tmp_path, model=tiny_model()) as engine:
        servers[0].seconds_per_token = 0.01
        engine.submit({"a": Request((2, 3), 0, SamplingSettings(120))})
        while not servers[0].num_tokens:
            time.sleep(0.005)
        engine.abort(["a"])
        servers[0].seconds_per_token = 0.0
        assert len(generate(engine, 2)) == 2
        assert servers[0].num_tokens < 120 + 2 * 60


def test_tokens_beyond_the_vocabulary_are_not_sent(tmp_path: Path) -> None:
    """vLLM's engine would end, for everybody."""
    with (
        stand_ins() as servers,
        connected(servers, tmp_path, model=tiny_model()) as engine,
        pytest.raises(UserError, match="beyond the policy's vocabulary"),
    ):
        generate_all(engine, [Request((VOCABULARY,), 0, LONG)])


def test_a_server_whose_last_update_never_ended_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run that was killed in the middle of one."""
    with stand_ins(2) as servers, connected(servers, tmp_path, model=tiny_model()) as engine:
        servers[0].has_open_update = True
        engine.load(other_model().state_dict().items())
        assert "already active; start this server again" in capsys.readouterr().err
        num = servers[0].num_requests
        generate(engine, 4)
        assert servers[0].num_requests == num


@pytest.mark.slow
def test_a_server_that_is_told_to_stop_is_lost(tmp_path: Path) -> None:
    """It answers what it had, and that its client ended the request."""
    with stand_ins(2) as servers, connected(servers, tmp_path, model=tiny_model()) as engine:
        expected = generate(engine)
        servers[0].change = lie(finish_reason="abort", token_ids=[], logprobs=None)
        assert generate(engine) == expected


def test_numbers_that_are_not_finite_are_the_policys_fault(tmp_path: Path) -> None:
    """vLLM has no NaN in its JSON: it sends -9999."""
    with stand_ins() as servers, connected(servers, tmp_path, model=tiny_model()) as engine:
        servers[0].change = in_choice(lambda c: c["logprobs"]["content"][0].update(logprob=-9999.0))
        stream = EngineTurns(engine, SETTINGS, seed=7, end_ids=frozenset([1]))
        with pytest.raises(NonFiniteLogitsError):
            play(stream, first_requests(1), num=1)


@pytest.mark.slow
def test_control_does_not_wait_for_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests than connections, which a push and the watch must not stand behind."""
    monkeypatch.setattr(engine_module, "_CONNECTIONS", 2)
    with (
        stand_ins() as servers,
        connected(servers, tmp_path, model=tiny_model(), timeout_s=3) as engine,
    ):
        servers[0].seconds_per_token = 0.05
        requests = {f"r{i}": Request((2 + i, 3), i, SamplingSettings(40)) for i in range(6)}
        engine.submit(requests)
        while not servers[0].num_tokens:
            time.sleep(0.005)
        started = time.monotonic()
        engine.load(other_model().state_dict().items())
        assert time.monotonic() - started < 2
        servers[0].seconds_per_token = 0.0
        found: dict[str, Generated] = {}
        while len(found) < len(requests):
            found |= engine.results(requests)


def test_weights_are_walked_to_the_end_where_a_push_fails(tmp_path: Path) -> None:
    """The other ranks gather their shards with this one."""
    with stand_ins() as servers, connected(servers, tmp_path, model=tiny_model()) as engine:
        servers[0].failure = "no"
        weights = iter(tiny_model().state_dict().items())
        with pytest.raises(EngineError, match="no"):
            engine.load(weights)
        assert next(weights, None) is None
        servers[0].stop()
        weights = iter(tiny_model().state_dict().items())
        with pytest.raises(EngineError, match="is lost"):
            engine.load(weights)
        assert next(weights, None) is None


def test_a_refused_update_ends_the_run_with_the_servers_reason(tmp_path: Path) -> None:
    with stand_ins(2) as servers, connected(servers, tmp_path, model=tiny_model()) as engine:
        servers[1].failure = "no weights in that folder"
        with pytest.raises(EngineError, match=f"{servers[1].url}.*no weights in that folder"):
            engine.load(other_model().state_dict().items())
        assert servers[0].told[-1] == servers[1].told[-1] == "/resume"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        stand_ins() as servers,
        connected(servers, tmp_path / "file") as engine,
        pytest.raises(EngineError, match=r"cannot be written.*rollouts\.servers\.weights_folder"),
    ):
        engine.load(tiny_model().state_dict().items())


# ---- lying servers ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIES)
def test_a_wrong_answer_is_one_line_that_names_the_server(name: str, tmp_path: Path) -> None:
    change, said = LIES[name]
    with stand_ins() as servers, connected(servers, tmp_path, model=tiny_model()) as engine:
        servers[0].change = change
        with pytest.raises(EngineError, match=said) as caught:
            generate(engine, 1)
    assert f"the rollout server {servers[0].url} gave a wrong answer" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_it_goes_on_after_an_end_token(tmp_path: Path) -> None:
    with stand_ins() as servers, connected(servers, tmp_path, model=tiny_model()) as engine:
        servers[0].change = in_choice(lambda c: c["token_ids"].append(4))
        end_ids = frozenset(range(VOCABULARY))
        with pytest.raises(EngineError, match="goes on after the end token"):
            generate_all(engine, [Request((2, 3), 0, LONG, end_ids)])


# ---- NCCL -------------------------------------------------------------------------------------


def test_workers_of_all_servers_have_ranks_of_their_own() -> None:
    """vLLM's trainer gives all of them the same offset: it knows of one server."""
    told: list[tuple[str, list[Any]]] = []
    client = SyncClient(
        lambda path, body: told.append((path, [body(place) for place in range(3)])), [2, 4, 1]
    )
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 8})
    client.update_weights({"names": ["a"]})
    (_, init), (path, update) = told
    assert [body["init_info"]["rank_offset"] for body in init] == [1, 3, 7]
    assert {body["init_info"]["world_size"] for body in init} == {8}
    assert path == "/update_weights"
    assert update == [{"update_info": {"names": ["a"]}}] * 3
