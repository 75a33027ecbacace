"""What cannot be made a batch of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vapo.config.schema import RewardConfig
from vapo.rollouts.batch import make_rollout_batch
from vapo.types import FinishReason, Prompt, Rollout, Verdict

JUDGED = Rollout(
    Prompt("p", "", (2,), "1"), (3,), "", (0.0,), FinishReason.STOP, verdict=Verdict(True, 1.0)
)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (Rollout(JUDGED.prompt, (3,), "", (0.0,), FinishReason.STOP), "has no verdict"),
        (replace(JUDGED, response_ids=(), rollout_logprobs=()), "has no response token"),
    ],
)
def test_a_rollout_without_a_verdict_or_a_token_is_an_error(rollout: Rollout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_rollout_batch(
            [JUDGED, rollout], group_size=1, rewards=RewardConfig(), max_response_tokens=2
        )
