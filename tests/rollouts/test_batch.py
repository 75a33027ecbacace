"""The columns of a batch that every loss reads, and what cannot be made a batch of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.judged import with_verdict
from vapo.config.schema import RewardConfig
from vapo.environments.contract import Verdict
from vapo.functional.columns import placed_rewards, without_failed
from vapo.rollouts.batch import make_rollout_batch
from vapo.rollouts.collection import is_mixed
from vapo.types import FinishReason, Prompt, Rollout, RolloutBatch, Turn

SAMPLED = Rollout(
    Prompt("p", "", (2,), "1"), (3,), "", (0.0,), FinishReason.STOP, turns=(Turn(0, 1),)
)
JUDGED = with_verdict(SAMPLED, Verdict(True, 1.0))


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


def batch_of(*rollouts: Rollout) -> RolloutBatch:
    return make_rollout_batch(rollouts, group_size=1, rewards=RewardConfig(), max_response_tokens=4)


def test_a_response_is_one_turn_which_has_the_verdicts_reward() -> None:
    long = replace(
        SAMPLED, response_ids=(3, 4, 5), rollout_logprobs=(0.0,) * 3, turns=(Turn(0, 3, version=2),)
    )
    long = with_verdict(long, Verdict(True, 0.5, "4"))
    assert (long.reward, long.version, long.extracted) == (0.5, 2, "4")
    batch = batch_of(JUDGED, long)
    assert batch.turn_starts.tolist() == [[True, False, False]] * 2
    assert batch.turn_rewards.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.5]]
    assert batch.rewards.tolist() == batch.unshaped_rewards.tolist() == [1.0, 0.5]
    assert batch.value_mask.equal(batch.response_mask)
    assert batch.is_lost.tolist() == [False, False]


def test_a_failed_verifier_is_trained_on_and_a_failed_environment_is_not() -> None:
    incorrect = with_verdict(SAMPLED, Verdict(False, -1.0, failure="timeout"))
    lost = replace(incorrect, in_environment=True, is_lost=True)
    batch = batch_of(incorrect, lost)
    assert batch.is_lost.tolist() == [False, True]
    assert batch.is_correct.tolist() == [False, False]
    assert batch.rewards[0] == -1.0
    assert without_failed(batch).rollouts == [incorrect]
    assert is_mixed([JUDGED, incorrect])
    assert not is_mixed([JUDGED, lost])


def test_what_stands_in_for_the_reward_of_a_single_turn_is_placed_as_it_is() -> None:
    """Less the turn's own reward, and with it again, 1e-8 would be 0."""
    placed = placed_rewards(batch_of(JUDGED), torch.tensor([1e-8]))
    assert placed.equal(torch.tensor([[1e-8]]))


def test_the_rest_of_several_turns_is_on_the_last() -> None:
    turns = (Turn(0, 1, 0.5), Turn(1, 1, 0.25))
    episode = Rollout(
        SAMPLED.prompt, (3, 4, 5), "", (0.0,) * 3, FinishReason.STOP, turns, True,
        in_environment=True,
    )  # fmt: skip
    batch = batch_of(episode)
    assert batch.turn_rewards.tolist() == [[0.5, 0.0, 0.25]]
    assert placed_rewards(batch, batch.rewards - 1).tolist() == [[0.5, 0.0, -0.75]]
