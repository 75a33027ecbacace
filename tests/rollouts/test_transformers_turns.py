"""The Transformers engine's stream of turns: kept caches, waiting turns, weights that change."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.forked import on_ranks
from tests.rollouts.sampler_contract import EOS
from tests.rollouts.turns_contract import (
    SETTINGS,
    TurnContract,
    alone,
    check_logprobs,
    first_requests,
    ids_of,
    next_request,
    observed,
    play,
)
from tests.tiny_model import tiny_model, tiny_tokenizer
from vapo.config.schema import TrainerConfig
from vapo.networks.actor_critic import Actor
from vapo.rollouts.engines.contract import NonFiniteLogitsError, SamplingSettings, TurnRequest
from vapo.rollouts.engines.transformers.detached import DetachedTransformersSampler
from vapo.rollouts.engines.transformers.kv_cache import RoomyLayer
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.system.distributed import gathered, shard


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def make(model, rows, kind=TransformersSampler):
    return kind(model, tiny_tokenizer(), max_concurrent_sequences=rows, device="cpu")


def endless_model():
    """One that hardly ever samples the end token."""

    def never(module, arguments, output):
        output.logits[..., EOS] = -1e9

    model = tiny_model(max_position_embeddings=4096)
    model.register_forward_hook(never)
    return model


class TestTurns(TurnContract):
    @pytest.fixture
    def turn_sampler(self):
        return make


def test_a_kept_cache_leaves_only_new_tokens_to_prefill():
    """Of each later turn: the last sampled token, which is in no cache, and the observation."""
    model = tiny_model(max_position_embeddings=512)
    with make(model, 4).turns(SETTINGS, seed=7) as stream:
        found = play(stream, first_requests(1, group_size=1), num=10)
        num_prefilled = stream.num_prefilled
    first = len(found[(0, 0), 0].request.ids)
    assert num_prefilled == first + sum(1 + len(observed((0, 0), turn)) for turn in range(1, 10))
    whole = sum(len(turn.request.ids) for turn in found.values())
    assert num_prefilled < whole / 4
    for turn in found.values():
        check_logprobs(model, turn)


@pytest.mark.slow
def test_caches_are_kept_of_few_episodes_and_others_prefill_again():
    model = tiny_model(max_position_embeddings=512)
    prefilled, wanted = {}, None
    for rows in (2, 32):
        with make(model, rows).turns(SETTINGS, seed=7) as stream:
            requests = first_requests(6)
            turns = {}
            for _ in range(4):  # the episodes' turns end together: all caches would be kept
                for request in requests:
                    stream.submit(request)
                requests = []
                while stream.num_open:
                    for turn in stream.step():
                        turns[turn.request.key, turn.request.turn] = turn
                        requests.append(next_request(turn))
                    assert stream.num_kept <= rows
            for request in requests:
                stream.forget(request.key)
            assert stream.num_kept == 0
            prefilled[rows] = stream.num_prefilled
        wanted = wanted or ids_of(turns)
        assert ids_of(turns) == wanted
    assert prefilled[2] > 1.5 * prefilled[32]


def roomy_layers():
    return [layer for layer in gc.get_objects() if isinstance(layer, RoomyLayer)]


def test_kept_caches_do_not_hold_those_of_other_rows(model):
    """Once the rows are joined again: of 15 ended turns there are 15 short rows, no more."""
    others = roomy_layers()  # of earlier tests
    with make(model, 16).turns(SETTINGS, seed=7) as stream:
        for place, request in enumerate(first_requests(8)):
            stream.submit(replace(request, max_tokens=1 + place // 2))
        num_tokens = 0
        while stream.num_open or num_tokens == 0:
            num_tokens += sum(len(t.request.ids) + len(t.ids) - 1 for t in stream.step())
        assert stream.step() == []
        assert stream.num_kept == 16
        layers = [layer for layer in roomy_layers() if layer not in others]
        storages = {layer.keys.untyped_storage() for layer in layers}
        num_numbers = sum(storage.nbytes() for storage in storages) // 4
    assert num_numbers == num_tokens * 2 * 2 * 8  # layers, heads and places of each token


def test_ids_that_do_not_extend_what_was_kept_are_prefilled_whole(model):
    with make(model, 4).turns(SETTINGS, seed=7) as stream:
        first = alone(stream, first_requests(2)[-1])
        before = stream.num_prefilled
        ids = (*first.request.ids[:-1], 3 + first.request.ids[-1] % 30, *first.ids, 9, 9)
        other = alone(stream, TurnRequest(first.request.key, 1, ids, 8))
        assert stream.num_prefilled - before == len(ids)
    check_logprobs(model, other)


def test_a_turn_without_new_tokens_samples_again_from_the_last(model):
    """Its ids are all in the cache: the last one runs again, for its logits."""
    with make(model, 4).turns(SETTINGS, seed=7) as stream:
        first = alone(stream, first_requests(2)[-1])
        ids = (*first.request.ids, *first.ids[:-1])
        other = alone(stream, TurnRequest(first.request.key, 1, ids, 8))
    check_logprobs(model, other)


def test_a_long_observation_beside_short_ones(model):
    """Each prefills little more than its own new tokens, and reads them on top of the kept."""
    with make(model, 8).turns(SETTINGS, seed=7) as stream:
        for request in first_requests(4):
            stream.submit(request)
        requests: list[TurnRequest] = []
        while stream.num_open:
            for turn in stream.step():
                more = [4 + len(requests)] * (80 if len(requests) == 1 else 1)
                ids = (*turn.request.ids, *turn.ids, *more)
                requests.append(TurnRequest(turn.request.key, 1, ids, 8))
        before = stream.num_prefilled
        found = play(stream, requests, num=2)
        assert stream.num_prefilled - before == 81 + 7 * 2
    for turn in found.values():
        check_logprobs(model, turn)


def test_a_turn_that_comes_while_others_are_sampled_does_not_wait_for_them():
    """One row of 8 is free: the turn is in it after a few steps, though nobody has finished."""
    model = endless_model()
    with make(model, 8).turns(SamplingSettings(max_response_tokens=1000), seed=7) as stream:
        for j in range(7):
            stream.submit(TurnRequest((0, j), 0, (5,), 1000))
        assert stream.step() == []
        stream.submit(TurnRequest((1, 0), 0, (5, 6), 4))
        ended = [turn for _ in range(4) for turn in stream.step()]
    assert [turn.request.key for turn in ended] == [(1, 0)]


def test_a_step_is_short():
    model = endless_model()
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    with make(model, 8).turns(SamplingSettings(max_response_tokens=100), seed=7) as stream:
        stream.submit(TurnRequest((0, 0), 0, (5,), 100))
        assert stream.step() == []
    assert 1 < len(forwards) <= 8


def test_weights_of_another_thread_are_taken_between_two_steps():
    """Open turns go on: tokens before the sync are the old weights', those after it the new's."""
    model = endless_model()
    sampler = make(model, 4, DetachedTransformersSampler)
    settings = SamplingSettings(max_response_tokens=64)
    request = TurnRequest((0, 0), 0, (5, 6, 7), 64)
    with sampler.turns(settings, seed=7) as stream:
        old = alone(stream, request)
    new = {name: tensor * 0.5 for name, tensor in model.state_dict().items()}
    with sampler.turns(settings, seed=7) as stream:
        stream.submit(request)
        for _ in range(3):
            assert stream.step() == []
        thread = threading.Thread(target=sampler.sync, args=(new.items(),))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        while not (found := stream.step()):
            pass
    assert found[0].ids[:20] == old.ids[:20]
    assert found[0].ids[-20:] != old.ids[-20:]


def test_a_sync_waits_for_the_steps_end_and_the_next_step_for_the_sync():
    model = endless_model()
    sampler = make(model, 4, DetachedTransformersSampler)
    was_synced: list[bool] = []  # at each forward after the sync was called
    num_syncs = before = 0

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_syncs
        yield from model.state_dict().items()
        num_syncs += 1

    def look(*_: Any) -> None:
        nonlocal before
        if not was_synced:
            before = num_syncs
            thread = threading.Thread(target=sampler.sync, args=(weights(),))
            thread.start()
            thread.join(0.01)
        was_synced.append(num_syncs > before)

    sampler._model.register_forward_hook(look)
    with sampler.turns(SamplingSettings(max_response_tokens=1000), seed=7) as stream:
        stream.submit(TurnRequest((0, 0), 0, (5, 6, 7), 1000))
        for _ in range(20):
            stream.step()
            assert len(was_synced) > 4
            assert not any(was_synced)
            was_synced[:] = [False]
            stream.step()
            assert all(was_synced[1:])
            assert len(was_synced) > 4
            was_synced.clear()


def test_the_module_is_in_training_mode_again_after_an_error():
    model = tiny_model().train()

    def fail() -> None:
        with make(model, 2).turns(SETTINGS, seed=7) as stream:
            assert not model.training
            assert not torch.is_grad_enabled()
            stream.submit(first_requests(1)[0])
            stream.step()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert model.training
    assert torch.is_grad_enabled()


def test_diverged_weights_are_an_error_that_names_the_turn():
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with make(model, 2).turns(SETTINGS, seed=7) as stream:
        stream.submit(first_requests(2)[-1])
        with pytest.raises(NonFiniteLogitsError, match="prompt made-up:1 "):
            stream.step()


# ---- ranks ------------------------------------------------------------------------------------


def turns_of_rank(nums_turns: list[list[int]]) -> list[list[list[int]]]:
    """Of each case the tokens of one episode, on a sharded policy; each rank has its own number
    of turns."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    actor = Actor(tiny_model(max_position_embeddings=512))
    shard(actor, mesh, TrainerConfig())
    sampler = TransformersSampler(
        actor.model,
        tiny_tokenizer(),
        max_concurrent_sequences=4,
        device="cpu",
        gather=lambda: gathered(actor),
    )
    request, cases = first_requests(1)[0], []
    for num_turns in nums_turns:
        num = num_turns[dist.get_rank()]
        with sampler.turns(SETTINGS, seed=7) as stream:
            found = play(stream, [request] if num else [], num=num)
        dist.barrier()
        cases.append([list(turn.ids) for turn in found.values()])
    dist.destroy_process_group()
    return cases


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_sharded_ranks_have_as_many_turns_as_their_episodes_need():
    """No collective is in a step: else the rank with more turns would wait for ever."""
    cases = [[12, 1], [0, 3]]
    of_ranks = on_ranks(2, turns_of_rank, cases, timeout_s=60)
    with make(tiny_model(max_position_embeddings=512), 4).turns(SETTINGS, seed=7) as stream:
        found = play(stream, first_requests(1)[:1], num=12)
    wanted = [list(turn.ids) for turn in found.values()]
    for case, num_turns in enumerate(cases):
        assert [own[case] for own in of_ranks] == [wanted[:num] for num in num_turns]
