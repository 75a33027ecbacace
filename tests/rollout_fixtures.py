"""Made-up rollouts of unequal lengths, for tests of what happens after sampling."""

from __future__ import annotations

import random

from vapo.types import FinishReason, Prompt, Rollout, Verdict


def make_rollouts(
    num: int, *, vocab_size: int, max_response: int = 12, seed: int = 0
) -> tuple[list[Rollout], list[Verdict]]:
    """`num` rollouts with random tokens and verdicts; the last is long and incorrect."""
    draw = random.Random(seed)
    rollouts, verdicts = [], []
    for i in range(num):
        prompt_ids = tuple(draw.randrange(2, vocab_size) for _ in range(draw.randint(2, 9)))
        length = max_response if i == num - 1 else draw.randint(1, max_response)
        response_ids = tuple(draw.randrange(2, vocab_size) for _ in range(length))
        is_correct = i != num - 1 and draw.random() < 0.5
        rollouts.append(
            Rollout(
                prompt=Prompt(f"made-up:{i}", f"problem {i}", prompt_ids, "1"),
                response_ids=response_ids,
                response_text="",
                rollout_logprobs=tuple(-draw.random() for _ in range(length)),
                finish_reason=FinishReason.STOP,
            )
        )
        verdicts.append(Verdict(is_correct=is_correct, reward=1.0 if is_correct else -1.0))
    return rollouts, verdicts
