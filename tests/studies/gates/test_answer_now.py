"""Responses that are cut at their middle and made to answer there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.rollouts.playing import InstantScorer, player_of
from tests.tiny_model import ragged_prompts, sample, tiny_model, tiny_tokenizer
from vapo.environments.contract import Verdict
from vapo.errors import UserError
from vapo.rollouts.engines.contract import SamplingSettings, TurnRequest
from vapo.rollouts.engines.transformers.sampler import TransformersSampler, TransformersTurns
from vapo.studies.gates.start_policy import answer_at_middle, answer_token_ids, middle_place
from vapo.types import Rollout


class Recorder(InstantScorer):
    """Judges nothing, and keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.judged: list[Rollout] = []

    def verdicts(self, rollouts: Sequence[Rollout], **_: Any) -> list[Verdict]:
        self.judged += rollouts
        return super().verdicts(rollouts)


class Engine(TransformersSampler):
    """Remembers the first turns that it was asked for."""

    @contextmanager
    def turns(self, settings: SamplingSettings, *, seed: int) -> Iterator[TransformersTurns]:
        self.seen: dict[tuple[int, int], TurnRequest] = {}
        with super().turns(settings, seed=seed) as stream:
            submit = stream.submit

            def submit_and_keep(request: TurnRequest) -> None:
                self.seen[request.key] = request
                submit(request)

            stream.submit = submit_and_keep  # type: ignore[method-assign]
            yield stream


def test_the_engine_continues_half_a_response_and_the_text() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    rollouts = sample(model, ragged_prompts(4), group_size=2)
    engine = Engine(model, tokenizer, max_concurrent_sequences=8, device="cpu")
    scorer = Recorder()
    ids = answer_token_ids("z;", tokenizer, max_response_tokens=32)
    found = answer_at_middle(
        rollouts,
        ids,
        player=player_of(engine, scorer),
        settings=SamplingSettings(max_response_tokens=32),
        seed=1,
    )
    assert len(found) == len(rollouts) == 8
    longest = max(middle_place(rollout) for rollout in rollouts)
    most = min(16, 32 - longest - 2)
    judged = {rollout.prompt.prompt_ids: rollout for rollout in scorer.judged}
    assert len(scorer.judged) == 8
    texts = {rollout.response_text for rollout in scorer.judged}
    for i, rollout in enumerate(rollouts):
        asked = engine.seen[i, 0]
        cut = len(rollout.response_ids) // 2
        kept = (*rollout.response_ids[:cut], *ids)
        assert asked.ids == (*rollout.prompt.prompt_ids, *kept)
        assert asked.max_tokens == most
        verified = judged[rollout.prompt.prompt_ids].prompt  # a verifier knows no other
        assert (verified.prompt_id, verified.answer) == (rollout.prompt.prompt_id, "1")
        half = tokenizer.decode(list(rollout.response_ids[:cut]), skip_special_tokens=False)
        assert any(text.startswith(f"{half}z;") for text in texts)


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
