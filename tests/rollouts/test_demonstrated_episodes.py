"""Demonstrations of several turns: the episodes that sampling would give, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.rollouts.scripted_episodes import ScriptedEnvironments, ScriptedStream
from tests.rollouts.test_episodes import KEY, config, counting, ids, play, prompts
from tests.tiny_model import tiny_model, tiny_tokenizer
from vapo.commands.sft import (
    cut,
    episode_example,
    prompt_example,
    require_demonstrations,
    summed_nll,
)
from vapo.environments.contract import Reply
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor
from vapo.rollouts.demonstrated_episodes import play_demonstrations
from vapo.types import Prompt, Rollout, Turn


def demonstrated(*turns: tuple[str, ...]) -> list[Prompt]:
    """The answer says how many turns the environment has."""
    rows = prompts(*(str(len(texts)) for texts in turns))
    return [replace(row, demonstration=t) for row, t in zip(rows, turns, strict=True)]


def played(rows: Sequence[Prompt], budget: int = 60, **options: Any) -> list[Rollout]:
    settings = config(**options)
    settings.rollouts.max_response_tokens = budget
    return play_demonstrations(
        rows, ScriptedEnvironments(counting), config=settings, tokenizer=tiny_tokenizer()
    )


def test_observations_stand_between_the_turns_that_were_given() -> None:
    (episode,) = played(demonstrated(("ab", "c")))
    assert episode.response_ids == (*ids("o0"), *ids("ab"), 1, *ids("o1"), *ids("c"), 1)
    assert episode.turns == (Turn(2, 3, 0.5), Turn(2, 2, 1.0))
    own = [0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert list(episode.is_sampled) == [bool(x) for x in own]


@pytest.mark.parametrize("options", [{}, {"observation_template": "<{observation}>"}])
def test_a_policy_that_says_the_same_gives_the_same_episode(options: dict[str, Any]) -> None:
    rows = demonstrated(("ab", "c"), ("d",), ("e", "f", "g"))
    saying = ScriptedStream(lambda r: rows[r.key[0]].demonstration[r.turn])  # type: ignore[index]
    sampled = play(ScriptedEnvironments(counting), rows, stream=saying, **options)
    for episode, shown in zip(sampled, played(rows, **options), strict=True):
        assert shown.response_ids == episode.response_ids
        assert shown.turns == episode.turns
        assert shown.finish_reason == episode.finish_reason


def test_loss_is_the_mean_over_the_policys_tokens_whatever_the_cuts() -> None:
    actor, episodes = Actor(tiny_model()), played(demonstrated(("ab", "c"), ("e", "f", "g")))
    with torch.no_grad():
        total, count = torch.zeros(()), 0
        for episode in episodes:
            start = len(episode.prompt.prompt_ids)
            everything = torch.tensor([*episode.prompt.prompt_ids, *episode.response_ids])
            logits = actor.model(everything[None]).logits[0]
            for place, is_own in enumerate(episode.is_sampled, start=start):
                if is_own:
                    target = everything[place]
                    total += nn.functional.cross_entropy(logits[place - 1], target)
                    count += 1
        for max_tokens in (1000, 1):
            batch = cut(
                [episode_example(episode) for episode in episodes], 0, max_tokens=max_tokens
            )
            assert batch.denominator == count == 5 + 6
            summed = sum(summed_nll(actor, m) for m in batch.microbatches)
            torch.testing.assert_close(summed / batch.denominator, total / count)


@pytest.mark.parametrize(
    ("turns", "num_turns", "options", "message"),
    [
        (("a",), 2, {}, "has 1 turn, after which the environment goes on"),
        (("a", "b", "c"), 2, {}, "has 3 turns, but the environment ends the episode after turn 2"),
        (("a", "b"), 2, {"max_turns": 1}, "raise environment.max_turns"),
        (("a", "bcd"), 2, {"max_turn_tokens": 3}, "turn 2 .* environment.max_turn_tokens"),
        (("a", "bcd"), 2, {"budget": 9}, "turn 2 .* rollouts.max_response_tokens"),
    ],
)
def test_what_does_not_fit_names_its_row(
    turns: tuple[str, ...], num_turns: int, options: dict[str, Any], message: str
) -> None:
    good, bad = demonstrated(("x",), turns)
    bad = replace(bad, prompt_id="rows.jsonl:7", answer=str(num_turns))
    with pytest.raises(UserError, match=f"rows.jsonl:7: .*{message}"):
        played([good, bad], **options)


def test_an_environment_that_fails_names_its_row() -> None:
    def failing(row: Mapping[str, Any], texts: Sequence[str]) -> Reply:
        return Reply(KEY, failure="timeout") if texts else Reply(KEY, "o")

    rows = [replace(demonstrated(("a", "b"))[0], prompt_id="rows.jsonl:3")]
    with pytest.raises(UserError, match=r"rows.jsonl:3: .*failed after turn 1 of 2: timeout"):
        play_demonstrations(
            rows, ScriptedEnvironments(failing), config=config(), tokenizer=tiny_tokenizer()
        )


def test_turns_need_an_environment() -> None:
    (row,) = demonstrated(("a", "b"))
    require_demonstrations([row])
    with pytest.raises(UserError, match=r"prompt p0 .*environment.kind"):
        prompt_example(row, tiny_tokenizer())
