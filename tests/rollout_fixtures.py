"""Made-up rollouts of unequal lengths, for tests of what happens after sampling."""

from __future__ import annotations

import random

from vapo.environments.contract import Verdict
from vapo.types import FinishReason, Prompt, Rollout, Turn


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
                turns=(Turn(0, length),),
            )
        )
        verdicts.append(Verdict(is_correct=is_correct, reward=1.0 if is_correct else -1.0))
    return rollouts, verdicts


def make_episodes(
    num: int, *, vocab_size: int, max_turns: int = 4, seed: int = 0
) -> tuple[list[Rollout], list[Verdict]]:
    """`num` episodes of unequal turns, every other one with an observation before its first turn.

    A turn has 1 to 4 sampled tokens, and a reward of its own. The last episode but one was cut
    at its number of turns, the last one in the middle of a turn.
    """
    draw = random.Random(seed)
    rollouts, verdicts = [], []
    for i in range(num):
        turns, ids, logprobs = [], [], []
        for k in range(draw.randint(1, max_turns)):
            observed = draw.randint(1, 3) if k or i % 2 else 0
            sampled = draw.randint(1, 4)
            turns.append(Turn(observed, sampled, draw.choice((-0.5, 0.0, 0.0, 1.0))))
            ids += [draw.randrange(2, vocab_size) for _ in range(observed + sampled)]
            logprobs += [0.0] * observed + [-draw.random() for _ in range(sampled)]
        ends = {num - 2: FinishReason.TURNS, num - 1: FinishReason.LENGTH}
        rollout = Rollout(
            prompt=Prompt(
                f"episode:{i}",
                f"episode {i}",
                tuple(draw.randrange(2, vocab_size) for _ in range(draw.randint(2, 9))),
                "1",
            ),
            response_ids=tuple(ids),
            response_text="",
            rollout_logprobs=tuple(logprobs),
            finish_reason=ends.get(i, FinishReason.STOP),
            turns=tuple(turns),
            in_environment=True,
        )
        reward = sum(turn.reward for turn in turns)
        rollouts.append(rollout)
        verdicts.append(Verdict(is_correct=i not in ends and reward > 0, reward=reward))
    return rollouts, verdicts
