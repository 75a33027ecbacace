"""What every stream of turns promises; a test class of an engine inherits these.

It gives three fixtures: `make_model` and `model`, as for `SamplerContract`, and
`turn_sampler(model, rows)`, an engine that samples turns.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.rollouts.playing import sample_all
from tests.rollouts.sampler_contract import EOS
from tests.tiny_model import ragged_prompts, tiny_tokenizer
from vapo.errors import UserError
from vapo.rollouts.engines.contract import (
    SampledTurn,
    SamplingSettings,
    TurnRequest,
    TurnStream,
    sampled_text,
)

Key = tuple[int, int]
Turns = dict[tuple[Key, int], SampledTurn]
SETTINGS = SamplingSettings(max_response_tokens=8)
PAD = 0  # the tiny model's; it is a special token


def observed(key: Key, turn: int) -> tuple[int, ...]:
    """What the environment writes before this turn: 1 to 9 tokens."""
    draw = random.Random(f"{key} {turn}")
    return tuple(draw.randrange(2, 40) for _ in range(draw.randint(1, 9)))


def first_requests(num: int, *, group_size: int = 2) -> list[TurnRequest]:
    prompts = ragged_prompts(num)
    return [
        TurnRequest((i, j), 0, prompt.prompt_ids, 8, prompt.prompt_id)
        for i, prompt in enumerate(prompts)
        for j in range(group_size)
    ]


def next_request(ended: SampledTurn) -> TurnRequest:
    request = ended.request
    ids = (*request.ids, *ended.ids, *observed(request.key, request.turn + 1))
    return TurnRequest(request.key, request.turn + 1, ids, request.max_tokens)


def num_turns(key: Key) -> int:
    return 1 + (3 * key[0] + 2 * key[1]) % 5


def play(stream: TurnStream, requests: list[TurnRequest], **turns: int) -> Turns:
    """Episodes of unequal numbers of turns, each next turn submitted when the last has ended."""
    for request in requests:
        stream.submit(request)
    found: Turns = {}
    while stream.num_open:
        for ended in stream.step():
            key, turn = ended.request.key, ended.request.turn
            found[key, turn] = ended
            if turn + 1 < turns.get("num", num_turns(key)):
                stream.submit(next_request(ended))
            else:
                stream.forget(key)
    return found


def ids_of(turns: Turns) -> dict[tuple[Key, int], tuple[int, ...]]:
    return {key: turn.ids for key, turn in turns.items()}


def alone(stream: TurnStream, request: TurnRequest) -> SampledTurn:
    """The turn without anything beside it."""
    stream.submit(request)
    while not (found := stream.step()):
        assert stream.num_open == 1
    (ended,) = found
    return ended


def check_logprobs(model: torch.nn.Module, turn: SampledTurn, *, atol: float = 1e-4) -> None:
    """Against one plain forward over the whole episode."""
    ids = [*turn.request.ids, *turn.ids]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    expected = torch.log_softmax(logits, -1)[len(turn.request.ids) - 1 : -1]
    expected = expected.gather(1, torch.tensor(turn.ids)[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(turn.logprobs), expected, atol=atol, rtol=0)


class TurnContract:
    @contextmanager
    def stream(self, sampler, settings=SETTINGS, seed=7) -> Iterator[TurnStream]:
        with sampler.turns(settings, seed=seed) as stream:
            yield stream

    def test_turns_are_those_of_a_fresh_stream_alone(self, turn_sampler, model):
        """Whatever is decoded beside them: with 3 rows for 12 episodes, places are refilled."""
        with self.stream(turn_sampler(model, rows=3), seed=8) as stream:
            found = play(stream, first_requests(6))
        assert len(found) == sum(num_turns((i, j)) for i in range(6) for j in range(2))
        assert len({turn.request.turn for turn in found.values()}) == 5
        assert len({len(turn.ids) for turn in found.values()}) > 2
        sampler = turn_sampler(model, rows=4)
        for turn in found.values():
            with self.stream(sampler, seed=8) as stream:
                again = alone(stream, turn.request)
            assert again.ids == turn.ids
            assert again.logprobs == pytest.approx(turn.logprobs, abs=1e-5)

    def test_first_turns_are_the_samplers_responses(self, turn_sampler, model):
        sampler = turn_sampler(model, rows=5)
        rollouts = sample_all(sampler, ragged_prompts(5), group_size=2, settings=SETTINGS, seed=7)
        with self.stream(sampler) as stream:
            found = play(stream, first_requests(5), num=1)
        assert [found[(i, j), 0].ids for i in range(5) for j in range(2)] == [
            rollout.response_ids for rollout in rollouts
        ]

    def test_each_turn_has_draws_of_its_own_and_of_the_seed(self, turn_sampler, model):
        sampler = turn_sampler(model, rows=5)
        ids = ragged_prompts(1)[0].prompt_ids
        keys = [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 1), (1, 0, 1)]
        found = set()
        for seed in (9, 12):
            with self.stream(sampler, seed=seed) as stream:
                for i, j, turn in keys:
                    found.add(alone(stream, TurnRequest((i, j), turn, ids, 8)).ids)
        assert len(found) == 10

    def test_logprobs_are_the_trainers_over_the_whole_episode(self, turn_sampler, model):
        with self.stream(turn_sampler(model, rows=4)) as stream:
            found = play(stream, first_requests(3), num=4)
        for turn in found.values():
            check_logprobs(model, turn)

    def test_special_tokens_inside_of_a_turn_are_tokens_like_others(self, turn_sampler, model):
        """Verifiers read them: an engine that left them out would hide `<answer>` from them."""
        with self.stream(turn_sampler(model, rows=6)) as stream:
            found = play(stream, first_requests(40), num=1)  # whatever an engine's draws are
        tokenizer = tiny_tokenizer()
        inside = [turn for turn in found.values() if PAD in turn.ids[:-1]]
        assert inside
        for turn in inside:
            check_logprobs(model, turn)
            text = sampled_text(turn.ids, tokenizer, (EOS,))
            assert text.count("<pad>") == turn.ids.count(PAD)

    def test_has_ended_and_the_budgets(self, turn_sampler, model):
        requests = [
            TurnRequest(r.key, 0, r.ids, 1 + place % 9)
            for place, r in enumerate(first_requests(12))
        ]
        with self.stream(turn_sampler(model, rows=6)) as stream:
            found = play(stream, requests, num=1)
        for turn in found.values():
            most = min(turn.request.max_tokens, SETTINGS.max_response_tokens)
            assert turn.has_ended == (turn.ids[-1] == EOS)
            assert EOS not in turn.ids[:-1]
            assert len(turn.ids) == len(turn.logprobs) <= most
            assert turn.has_ended or len(turn.ids) == most
        assert {turn.has_ended for turn in found.values()} == {True, False}

    @pytest.mark.slow
    @pytest.mark.parametrize("rows", [2, 16])
    def test_a_forgotten_turn_does_not_come_and_its_episode_can_begin_again(
        self, turn_sampler, model, rows
    ):
        """With 2 rows it waits in the queue; with 16 it is being decoded.

        A server may have ended all turns before the first look at them; then they begin anew.
        """
        sampler = turn_sampler(model, rows=rows)
        requests = first_requests(12)
        with self.stream(sampler) as stream:
            wanted = ids_of(play(stream, requests, num=2))
        for _ in range(20):
            with self.stream(sampler) as stream:
                for request in requests:
                    stream.submit(request)
                found = {(turn.request.key, 0): turn for turn in stream.step()}
                open_keys = [r.key for r in requests if (r.key, 0) not in found]
                if open_keys:
                    self.forget_one(stream, requests, found, open_keys[-1], wanted)
                    return
        raise AssertionError("no turn was still open at the first look")

    def forget_one(self, stream, requests, found, dropped, wanted):
        before = stream.num_open
        stream.forget(dropped)
        assert stream.num_open == before - 1
        for turn in found.values():
            stream.submit(next_request(turn))
        while stream.num_open:
            for turn in stream.step():
                found[turn.request.key, turn.request.turn] = turn
                if turn.request.turn == 0:
                    stream.submit(next_request(turn))
        assert ids_of(found) == {k: ids for k, ids in wanted.items() if k[0] != dropped}
        again = alone(stream, next(r for r in requests if r.key == dropped))
        assert again.ids == wanted[dropped, 0]

    def test_an_idle_stream_returns_at_once(self, turn_sampler, model):
        with self.stream(turn_sampler(model, rows=4)) as stream:
            assert stream.num_open == 0
            assert stream.step() == []
            alone(stream, first_requests(1)[0])
            assert stream.num_open == 0
            assert stream.step() == []

    def test_an_episode_has_one_open_turn(self, turn_sampler, model):
        request = first_requests(1)[0]
        with self.stream(turn_sampler(model, rows=4)) as stream:
            stream.submit(request)
            with pytest.raises(ValueError, match=r"episode \(0, 0\) is open"):
                stream.submit(request)

    def test_turns_that_cannot_be_sampled(self, turn_sampler, model):
        with self.stream(turn_sampler(model, rows=4)) as stream:
            with pytest.raises(UserError, match=r"prompt p3, turn 2 .* 128 positions"):
                stream.submit(TurnRequest((3, 1), 2, (5,) * 125, 8, "p3"))
            with pytest.raises(UserError, match="nothing to continue"):
                stream.submit(TurnRequest((3, 1), 2, (), 8))
            assert stream.num_open == 0

    def test_end_ids(self, turn_sampler, model):
        assert turn_sampler(model, rows=1).end_ids == {EOS}
