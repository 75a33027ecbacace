"""Responses that are cut at their middle and made to answer there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.tiny_model import ragged_prompts, sample, tiny_model, tiny_tokenizer
from vapo.errors import UserError
from vapo.rollouts.answer_now import answer_token_ids, answered_half_way, half_way
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.types import Prompt, Rollout, Verdict


class Recorder:
    """Judges nothing, and keeps what it was given."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        self.rollouts = list(rollouts)
        return [Verdict(False, -1.0)] * len(rollouts)


class Engine(TransformersSampler):
    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        settings: SamplingSettings,
        seed: int,
        advance: Callable[[int], None] = lambda n: None,
    ) -> list[Rollout]:
        self.seen, self.settings = list(prompts), settings
        return super().sample(
            prompts, group_size=group_size, settings=settings, seed=seed, advance=advance
        )


def test_the_engine_continues_half_a_response_and_the_text() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    rollouts = sample(model, ragged_prompts(4), group_size=2)
    engine = Engine(model, tokenizer, max_concurrent_sequences=8, device="cpu")
    scorer: Any = Recorder()
    ids = answer_token_ids("z;", tokenizer, max_response_tokens=32)
    found = answered_half_way(
        rollouts,
        ids,
        sampler=engine,
        scorer=scorer,
        tokenizer=tokenizer,
        settings=SamplingSettings(max_response_tokens=32),
        seed=1,
    )
    assert len(found) == len(rollouts) == 8
    longest = max(half_way(rollout) for rollout in rollouts)
    assert engine.settings.max_response_tokens == min(16, 32 - longest - 2)
    for rollout, asked, judged in zip(rollouts, engine.seen, scorer.rollouts, strict=True):
        cut = len(rollout.response_ids) // 2
        kept = (*rollout.response_ids[:cut], *ids)
        assert asked.prompt_ids == (*rollout.prompt.prompt_ids, *kept)
        assert judged.prompt is rollout.prompt  # the verifier and the critic know no other
        assert judged.response_ids[: cut + 2] == kept
        assert len(judged.response_ids) > cut + 2
        half = tokenizer.decode(list(rollout.response_ids[:cut]), skip_special_tokens=True)
        assert judged.response_text.startswith(f"{half}z;")
        assert len(judged.rollout_logprobs) == len(judged.response_ids)


@pytest.mark.parametrize(
    ("text", "budget", "said"),
    [
        ("Answer", 32, "the tokenizer of actor.path writes it as"),
        ("", 32, "the tokenizer of actor.path writes it as"),
        (";;;;", 8, "rollouts.max_response_tokens (8) has no room"),
    ],
)
def test_a_text_that_cannot_be_used(text: str, budget: int, said: str) -> None:
    with pytest.raises(UserError, match="--answer_now") as raised:
        answer_token_ids(text, tiny_tokenizer(), max_response_tokens=budget)
    assert said in str(raised.value)
