"""Responses are judged when they end: while others are sampled, once, and as whole responses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.judged import verdict_of
from tests.rewards.test_scorer import scorer as verifier
from tests.rollouts.playing import InstantScorer, player_of
from tests.rollouts.scripted_episodes import ScriptedEngine, ScriptedStream
from tests.tiny_model import ragged_prompts, tiny_tokenizer
from vapo.environments.contract import Verdict
from vapo.rewards.judged_responses import JudgedResponses
from vapo.rollouts.engines.contract import SampledTurn, SamplingSettings, TurnRequest
from vapo.types import FinishReason, Prompt, Rollout, Turn

SETTINGS = SamplingSettings(max_response_tokens=8)


def say(text: str) -> ScriptedEngine:
    return ScriptedEngine(ScriptedStream(lambda request: text))


def test_a_response_is_judged_while_others_are_sampled() -> None:
    """The second ends only after the first has its verdict."""
    was_judged = threading.Event()

    class Stream(ScriptedStream):
        def step(self) -> list[SampledTurn]:
            second = {key for key in self.open if key[0] == 1 and not was_judged.is_set()}
            held = {key: self.open.pop(key) for key in second}
            done = super().step()
            self.open |= held
            return done

    class Judge(InstantScorer):
        def verdicts(self, rollouts: Sequence[Rollout], **_: Any) -> list[Verdict]:
            was_judged.set()
            return [Verdict(True, 1.0)]

    engine = ScriptedEngine(Stream(lambda request: "a"))
    found = player_of(engine, Judge()).play(
        ragged_prompts(2), group_size=1, settings=SETTINGS, seed=0
    )
    assert [verdict_of(r) for r in found] == [Verdict(True, 1.0)] * 2


def test_a_cut_response_is_judged_and_stays_cut() -> None:
    class Judge(InstantScorer):
        def verdicts(self, rollouts: Sequence[Rollout], **_: Any) -> list[Verdict]:
            (one,) = rollouts
            self.seen = one.response_text, one.finish_reason
            return [Verdict(True, 2.0)]

    judge = Judge()
    (found,) = player_of(say("abcdefghijkl"), judge).play(
        ragged_prompts(1), group_size=1, settings=SETTINGS, seed=0
    )
    assert found.finish_reason is FinishReason.LENGTH
    assert judge.seen == ("abcdefgh", FinishReason.LENGTH)
    assert (found.response_text, verdict_of(found)) == ("abcdefgh", Verdict(True, 2.0))


def test_a_continued_response_is_judged_as_a_whole() -> None:
    seen: list[TurnRequest] = []

    class Judge(InstantScorer):
        def verdicts(self, rollouts: Sequence[Rollout], **_: Any) -> list[Verdict]:
            return [Verdict(r.response_text == "xyab", 1.0) for r in rollouts]

    def text(request: TurnRequest) -> str:
        seen.append(request)
        return "ab"

    ids = tuple(tiny_tokenizer()("xy")["input_ids"])
    prompt = Prompt("p", "", (2, 3), "1")
    start = Rollout(prompt, ids, "xy", (-1.0, -1.0), FinishReason.LENGTH, (Turn(0, 2),))
    engine = ScriptedEngine(ScriptedStream(text))
    found = player_of(engine, Judge()).play([start], group_size=2, settings=SETTINGS, seed=0)
    assert [(r.response_text, r.finish_reason) for r in found] == [("xyab", FinishReason.STOP)] * 2
    assert [r.is_correct for r in found] == [True, True]
    assert found[0].rollout_logprobs == (-1.0, -1.0, -0.5, -0.5, -0.5)
    assert {(r.ids, r.max_tokens) for r in seen} == {((2, 3, *ids), 6)}


def test_what_is_given_up_is_withdrawn() -> None:
    """The verifier's processes do not work on the responses of a loop that has ended."""
    withdrawn: list[str] = []

    class Slow(InstantScorer):
        def submit(self, rollout: Rollout, on_verdict: Any, **_: Any) -> Callable[[], None]:
            return lambda: withdrawn.append(rollout.response_text)

    player = player_of(say("ab"), Slow())
    with player.loop(SETTINGS, seed=0, num_responses=1, version=lambda: None) as loop:
        loop.add(ragged_prompts(1)[0], (0, 0))
        loop.step()
        assert loop.step() == []
        assert loop.num_open == 1
    assert withdrawn == ["ab"]


def test_a_verdict_comes_once_and_only_for_what_is_open() -> None:
    judged = JudgedResponses(InstantScorer())
    judged.reset((0,), ragged_prompts(1)[0])
    assert [reply.observation for reply in judged.poll(0.0)] == [""]
    judged.step((0,), "a", has_ended=True)
    (reply,) = judged.poll(0.0)
    assert reply.verdict == Verdict(False, -1.0)
    assert judged.poll(0.0) == []


def test_forgotten_tasks_get_no_reply_and_others_do() -> None:
    with verifier("regex", pattern="(\\d)", num_workers=1) as regex:
        pool = regex.judges[0].deciding.pool
        assert pool is not None
        replies: list[Any] = []
        asked = [pool.submit((str(i), "1", {}), replies.append) for i in range(8)]
        for question in asked[::2]:
            question.forget()
        while len(replies) < 4:
            pool.poll(0.5)
        pool.poll(0.0)
        assert [reply["extracted"] for reply in replies] == ["1", "3", "5", "7"]


@pytest.mark.parametrize("group_size", [0, -1])
def test_a_group_has_a_response(group_size: int) -> None:
    with pytest.raises(ValueError, match="group_size"):
        player_of(say("a")).play(
            ragged_prompts(1), group_size=group_size, settings=SETTINGS, seed=0
        )


def test_rows_are_in_the_prompts_order_whoever_starts_or_ends_first() -> None:
    """Those with most tokens start first; a group's samples are in their own order."""
    stream = ScriptedStream(
        lambda request: f"{len(request.ids)}{request.key[1]}",
        takes=lambda request: 1 + (request.key[0] + request.key[1]) % 3,
    )
    asked = [Prompt(str(n), "", (2,) * n, "1") for n in (2, 4, 3)]
    found = player_of(ScriptedEngine(stream)).play(
        asked, group_size=3, settings=SETTINGS, seed=0, first=5
    )
    assert [r.prompt.prompt_id for r in found] == ["2"] * 3 + ["4"] * 3 + ["3"] * 3
    assert [r.response_text for r in found] == [f"{n}{j}" for n in (2, 4, 3) for j in range(3)]
    assert [len(r.ids) for r in stream.requests] == [4, 4, 4, 3, 3, 3, 2, 2, 2]


def test_turns_are_the_engines_own_requests() -> None:
    """The first sample's seed is of (prompt, sample), from `first` on."""
    engine = say("a")
    player_of(engine).play(ragged_prompts(2), group_size=1, settings=SETTINGS, seed=0, first=3)
    assert {request.key for request in engine.stream.requests} == {(3, 0), (4, 0)}
