"""Turns over an engine of its own: the Transformers engine as a rollout server has it."""

from __future__ import annotations

import copy
import importlib.util
import threading

import pytest
import torch

from tests.rollouts.playing import sample_all
from tests.rollouts.sampler_contract import SamplerContract, ids_of
from tests.rollouts.serving import FakeEngine
from tests.rollouts.test_transformers_turns import make
from tests.rollouts.turns_contract import (
    SETTINGS,
    TurnContract,
    first_requests,
    next_request,
    play,
)
from tests.rollouts.turns_contract import ids_of as turn_ids
from tests.tiny_model import ragged_prompts, sample, tiny_model
from tests.vllm_engine import make_vllm_sampler
from vapo.rollouts.engines import engine_turns
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import Generated, Request, sampled
from vapo.rollouts.engines.transformers.engine import TransformersEngine


class Parts:
    """An engine that samples whole batches only."""

    has_weights, max_tokens = True, 128

    def __init__(self, whole):
        self.load, self.generate = whole.load, whole.generate

    def sleep(self): ...

    def close(self): ...


def engine_of(model, rows):
    return TransformersEngine(copy.deepcopy(model), max_rows=rows, device=torch.device("cpu"))


def sample_with_engine(model, prompts, *, group_size=4, rows=8, seed=7, **settings):
    sampler = make_vllm_sampler(engine_of(model, rows), model)
    how = SamplingSettings(**{"max_response_tokens": 32, **settings})
    return sample_all(sampler, prompts, group_size=group_size, settings=how, seed=seed)


class TestResponses(SamplerContract):
    num_draws = 2000

    @pytest.fixture(scope="class")
    def model(self):
        return tiny_model()

    @pytest.fixture
    def make_model(self):
        return tiny_model

    @pytest.fixture
    def sample(self):
        return sample_with_engine


class TestTurns(TurnContract):
    @pytest.fixture(scope="class")
    def model(self):
        return tiny_model()

    @pytest.fixture
    def turn_sampler(self):
        return lambda model, rows: make_vllm_sampler(engine_of(model, rows), model)


def test_responses_and_turns_are_the_trainers_own_engines():
    model = tiny_model()
    prompts = ragged_prompts(6)
    assert ids_of(sample_with_engine(model, prompts)) == ids_of(sample(model, prompts))
    with make(model, 4).turns(SETTINGS, seed=7) as stream:
        wanted = turn_ids(play(stream, first_requests(4)))
    with make_vllm_sampler(engine_of(model, 4), model).turns(SETTINGS, seed=7) as stream:
        assert turn_ids(play(stream, first_requests(4))) == wanted


def test_a_batch_beside_an_open_stream_and_two_streams():
    """Each takes its own results, whoever steps."""
    model = tiny_model()
    sampler = make_vllm_sampler(engine_of(model, 4), model)
    prompts = ragged_prompts(4)
    alone = ids_of(sample_all(sampler, prompts, group_size=2, settings=SETTINGS, seed=3))
    with sampler.turns(SETTINGS, seed=7) as stream:
        wanted = turn_ids(play(stream, first_requests(3)))
    with sampler.turns(SETTINGS, seed=8) as stream:
        others = turn_ids(play(stream, first_requests(3)))
    with sampler.turns(SETTINGS, seed=7) as stream, sampler.turns(SETTINGS, seed=8) as other:
        for request in first_requests(3):
            other.submit(request)
        other.step()
        beside = sample_all(sampler, prompts, group_size=2, settings=SETTINGS, seed=3)
        assert ids_of(beside) == alone
        assert turn_ids(play(stream, first_requests(3))) == wanted
        rest = turn_ids(play(other, []))
        assert rest
        assert rest.items() <= others.items()


def test_open_turns_go_on_with_new_weights():
    model = tiny_model()
    engine = engine_of(model, 4)
    sampler = make_vllm_sampler(engine, model)
    requests = first_requests(4)
    with sampler.turns(SETTINGS, seed=7) as stream:
        for request in requests:
            stream.submit(request)
        found = stream.step()
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(-1)
        sampler.sync(model.state_dict().items())
        while stream.num_open:
            found += stream.step()
    assert {turn.request.key for turn in found} == {request.key for request in requests}
    again = sample_all(sampler, ragged_prompts(4), group_size=2, settings=SETTINGS, seed=3)
    direct = sample(model, ragged_prompts(4), group_size=2, seed=3, max_response_tokens=8)
    assert ids_of(again) == ids_of(direct)


def test_new_weights_have_no_use_for_the_caches_of_ended_turns():
    """An episode that goes on after a load has a fresh engine's tokens and log-probs."""
    model = tiny_model()
    engine = engine_of(model, 4)
    sampler = make_vllm_sampler(engine, model)
    requests = first_requests(2)
    with sampler.turns(SETTINGS, seed=7) as stream:
        turns = play(stream, requests, num=1)
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
        sampler.sync(model.state_dict().items())
        again = [next_request(turns[request.key, 0]) for request in requests]
        found = turn_ids(play(stream, again, num=2))
    with make_vllm_sampler(engine_of(model, 4), model).turns(SETTINGS, seed=7) as stream:
        assert turn_ids(play(stream, again, num=2)) == found


def test_streams_of_several_processes_name_their_episodes_differently():
    """One server may have several trainers, one after the other or at once."""
    engine = FakeEngine()
    engine.resume.clear()
    names: list[str | None] = []
    for _ in range(2):  # the module as each of two processes has it
        spec = importlib.util.find_spec(engine_turns.__name__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        stream = module.EngineTurns(engine, SETTINGS, seed=7, end_ids=frozenset([1]))
        for request in first_requests(2):
            stream.submit(request)
        stream.step()
        names += [request.episode for request in engine.open.values()]
        stream.drop()
    assert len(names) == 8
    assert len(set(names)) == 8


def test_a_stream_that_ends_early_leaves_nothing_behind():
    model = tiny_model()
    engine = engine_of(model, 4)
    sampler = make_vllm_sampler(engine, model)
    with sampler.turns(SETTINGS, seed=7) as stream:
        for request in first_requests(4):
            stream.submit(request)
        stream.step()
    assert engine.results(["any"]) == {}
    once = [Request((2, 3, 4), seed=5)]
    first = sampled(engine, once, SETTINGS, end_ids=frozenset([1]))
    assert sampled(engine, once, SETTINGS, end_ids=frozenset([1])) == first


def test_equal_prompts_of_a_batch_share_their_prefill():
    model, shapes = tiny_model(), []
    model.register_forward_hook(lambda module, _, output: shapes.append(output.logits.shape[0]))
    engine = TransformersEngine(model, max_rows=16, device=torch.device("cpu"))
    requests = [Request((2 + seed % 2, 3, 4), seed=seed) for seed in range(8)]
    sampled(engine, requests, SETTINGS, end_ids=frozenset([1]))
    assert shapes[0] == 2


def test_a_thread_that_submits_is_before_the_next_step_of_another():
    engine = FakeEngine()
    num_late = 0
    threads: list[threading.Thread] = []

    def submit() -> None:
        engine.submit({str(len(threads)): Request((2,), 1)}, SETTINGS, end_ids=frozenset())

    def step() -> dict[str, Generated]:
        nonlocal num_late
        if len(threads) == len(engine.open):  # the last one's request has come
            threads.append(threading.Thread(target=submit))
            threads[-1].start()
            threads[-1].join(0.01)  # it waits for the end of this step
            assert len(threads) > len(engine.open)
        else:
            num_late += 1
        return {}

    engine._step = step  # type: ignore[method-assign]
    while len(threads) < 30:
        engine.results(["nobody's"])
    threads[-1].join(10)
    assert num_late == 0
