"""What cannot be made a batch of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vapo.config.schema import RewardConfig
from vapo.environments.contract import Verdict
from vapo.rollouts.batch import make_rollout_batch
from vapo.types import FinishReason, Prompt, Rollout, Turn

SAMPLED = Rollout(
    Prompt("p", "", (2,), "1"), (3,), "", (0.0,), FinishReason.STOP, turns=(Turn(0, 1),)
)
JUDGED = Verdict(True, 1.0).on(SAMPLED)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (SAMPLED, "has no verdict"),
        (replace(JUDGED, response_ids=(), rollout_logprobs=(), turns=()), "has no response token"),
    ],
)
def test_a_rollout_without_a_verdict_or_a_token_is_an_error(rollout: Rollout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_rollout_batch(
            [JUDGED, rollout], group_size=1, rewards=RewardConfig(), max_response_tokens=2
        )
