"""Thoughts that a chat template opens, closes or takes out: no token that was sampled changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.networks.chat_tokenizers import ids_of, text_of
from tests.prompts.test_load_prompts import both
from tests.prompts.thinking_chat import ASKS, NO_THOUGHTS, OFF, thinking_tokenizer
from tests.rollouts.playing import AnsweringScorer, player_of
from tests.rollouts.scripted_episodes import ScriptedEngine, ScriptedEnvironments, ScriptedStream
from tests.rollouts.test_episodes import config, counting
from vapo.commands.sft import prompt_example
from vapo.config import FitConfig
from vapo.networks.end_tokens import end_tokens
from vapo.prompts.load import load_prompts
from vapo.rollouts.demonstrated_episodes import play_demonstrations
from vapo.rollouts.engines.contract import SampledTurn, SamplingSettings, TurnRequest
from vapo.types import Prompt, Rollout

THOUGHT = "<think>\nthe third\n</think>\n\n"
VARIABLES: list[dict[str, Any]] = [{}, OFF, {"opens_thoughts": True}]
TOKENIZERS = [thinking_tokenizer(), thinking_tokenizer(are_special=True)]


class Thinking(ScriptedStream):
    """Samples thoughts one byte a token, as no text is tokenized: `t` and `h`, not `th`."""

    def turn(self, request: TurnRequest) -> SampledTurn:
        ids = sampled(self.say(request))
        return SampledTurn(request, ids, (-0.5,) * len(ids), has_ended=True)


def sampled(answer: str) -> tuple[int, ...]:
    tokenizer = TOKENIZERS[0]
    thought = [i for letter in "the third" for i in ids_of(letter, tokenizer)]
    before, after = THOUGHT.split("the third")
    text = (*ids_of(before, tokenizer), *thought, *ids_of(f"{after}{answer}", tokenizer))
    return (*text, int(tokenizer.eos_token_id))


def settings(arguments: dict[str, Any]) -> FitConfig:
    made = config()
    made.data.chat_template, made.data.chat_template_kwargs = True, arguments
    made.rollouts.max_response_tokens = 400
    return made


def loaded(tmp_path: Path, problem: Any, arguments: dict[str, Any], **fields: Any) -> Prompt:
    options = {"chat_template": True, "chat_template_kwargs": arguments, **fields}
    return load_prompts(both(tmp_path, [problem], ["z"], **options), TOKENIZERS[0]).train[0]


@pytest.mark.parametrize(
    ("arguments", "opening"), zip(VARIABLES, ("", NO_THOUGHTS, "<think>\n"), strict=True)
)
def test_the_turns_of_an_episode_are_read_as_they_were_sampled(
    tmp_path: Path, arguments: dict[str, Any], opening: str
) -> None:
    """The template would take the thoughts out of the first turn, were it rendered again."""
    tokenizer, texts = TOKENIZERS[0], list[str]()

    def answer(row: Mapping[str, Any], said: Sequence[str]) -> Any:
        texts[:] = said
        return counting(row, said)

    prompt = replace(loaded(tmp_path, "Guess.", arguments), answer="2")
    stream = Thinking(lambda request: "ab"[request.turn])
    scorer = AnsweringScorer(ScriptedEnvironments(answer))
    player = player_of(ScriptedEngine(stream), scorer, settings(arguments), tokenizer)
    limits = SamplingSettings(max_response_tokens=400)
    (episode,) = player.play([prompt], group_size=1, settings=limits, seed=1)
    first, second = (request.ids for request in stream.requests)
    asked = "{}<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n" + opening
    begin = ids_of(asked.format("<|im_end|>\n", "o0"), tokenizer)
    between = ids_of(asked.format("\n", "o1"), tokenizer)
    assert text_of(prompt.prompt_ids, tokenizer) == ASKS.format("Guess.") + opening
    assert first == (*prompt.prompt_ids, *begin)
    assert second == (*first, *sampled("a"), *between)
    assert episode.response_ids == (*begin, *sampled("a"), *between, *sampled("b"))
    own = [i for i, is_own in zip(episode.response_ids, episode.is_sampled, strict=True) if is_own]
    assert tuple(own) == sampled("a") + sampled("b")
    assert texts == [f"{THOUGHT}a", f"{THOUGHT}b"], "and the environment reads them"
    again: list[Any] = [
        {"role": "assistant", "content": texts[0]},
        {"role": "user", "content": "o1"},
    ]
    assert "third" not in tokenizer.apply_chat_template(again, tokenize=False)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["plain", "special"])
@pytest.mark.parametrize("arguments", VARIABLES)
def test_demonstrations_are_taught_with_their_thoughts(tokenizer: Any, arguments: Any) -> None:
    """Of one turn, and of an episode: all of them, and the template's end token."""
    ends = end_tokens(tokenizer, data=settings(arguments).data)
    row = Prompt("p", "q", (65,), "2", demonstration=f"{THOUGHT}a")
    _, ids, has_loss = prompt_example(row, tokenizer, ends)
    assert ids == ids_of(f"{THOUGHT}a<|im_end|>", tokenizer)
    assert all(has_loss)
    turns = replace(row, demonstration=(f"{THOUGHT}a", f"{THOUGHT}b"))
    episode: Rollout
    (episode,) = play_demonstrations(
        [turns], ScriptedEnvironments(counting), config=settings(arguments), tokenizer=tokenizer
    )
    own = [i for i, is_own in zip(episode.response_ids, episode.is_sampled, strict=True) if is_own]
    assert tuple(own) == ids_of(f"{THOUGHT}a<|im_end|>{THOUGHT}b<|im_end|>", tokenizer)
    assert episode.response_text.count("the third") == 2


def test_messages_of_several_turns_have_the_configs_system_prompt_or_their_own(
    tmp_path: Path,
) -> None:
    """The thoughts of earlier turns are taken out by the template, as it does everywhere."""
    turns = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": f"{THOUGHT}2"},
        {"role": "user", "content": "And 2+2?"},
    ]
    said = "<|im_start|>{}\n{}<|im_end|>\n".format
    rest = said("user", "1+1?") + said("assistant", "2") + ASKS.format("And 2+2?") + NO_THOUGHTS
    for role in ("system", "developer"):
        own = [{"role": role, "content": "mine"}, *turns]
        assert loaded(tmp_path, own, OFF, system_prompt="general").text == said(role, "mine") + rest
    general = said("system", "general") + rest
    prompt = loaded(tmp_path, turns, OFF, system_prompt="general")
    assert prompt.text == general
    assert prompt.prompt_ids == ids_of(general, TOKENIZERS[0])
    assert loaded(tmp_path, turns, OFF).text == rest, "without one none is written"
    plain = loaded(tmp_path, "And 2+2?", OFF, system_prompt="general").text
    assert plain == said("system", "general") + ASKS.format("And 2+2?") + NO_THOUGHTS
