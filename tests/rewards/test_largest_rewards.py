"""The largest reward is one whose squares a batch can add up in float32, wherever it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.fits import fit_config
from vapo.config import FitConfig
from vapo.config.options import Option, describe
from vapo.errors import UserError
from vapo.rewards.reward_model import ModelJudge
from vapo.rollouts.stored_columns import FileRow
from vapo.user_code.process_protocol import MAX_REWARD, reward_of, reward_problem

TOO_LARGE = [1.001e12, 1e15, 1e19, 1e25, 1e38, 3.4e38, 1e39, 1e308, 10**400]


def test_squares_of_the_largest_add_up_over_a_batch_and_the_weights_of_a_network() -> None:
    difference = torch.tensor(2 * MAX_REWARD)  # a value of one sign, and a reward of the other
    num_tokens, num_weights = 2048 * 32768, 10**11
    assert torch.isfinite(difference**2 * num_tokens)
    assert torch.isfinite(difference**2 * num_weights)


@pytest.mark.parametrize("sign", [1, -1])
def test_what_a_reward_can_be(sign: int) -> None:
    assert reward_problem(sign * MAX_REWARD) is None
    assert reward_of(sign * MAX_REWARD) == sign * MAX_REWARD
    for number in TOO_LARGE:
        assert reward_of(sign * number) is None
        if isinstance(number, float):
            assert "a number of at most 1e+12 in size" in (reward_problem(sign * number) or "")


@pytest.mark.parametrize("reward", [1e38, -1e25, 1e19])
def test_a_reward_model_s(reward: float) -> None:
    judge: Any = object.__new__(ModelJudge)
    replies: list[dict[str, Any]] = []
    judge._threshold, judge._waiting = 0.0, dict.fromkeys(range(2), (None, replies.append))
    judge._scores = lambda rollouts: [reward, 1.5]
    judge.poll(1.0)
    assert "at most 1e+12 in size" in replies[0]["failure"]
    assert replies[1] == {"is_correct": True, "reward": 1.5}


@pytest.mark.parametrize("rewards", [[1e38, -1e38], [9e11, 9e11], [1e19]])
def test_those_of_a_stored_episode_s_turns(rewards: list[float]) -> None:
    row = FileRow({}, "a.parquet: row 1")
    with pytest.raises(UserError, match=r"row 1, column turn_rewards: added up without their si"):
        row.check_rewards("turn_rewards", rewards)
    row.check_rewards("turn_rewards", [4e11, -4e11])


KEYS = ["rewards.correct", "rewards.incorrect", "critic.head.low", "critic.head.high"]


@pytest.mark.parametrize("key", [*KEYS, "critic.head.mean_reward"])
def test_those_of_a_config_have_the_same_range(key: str) -> None:
    option = describe(FitConfig)[key]
    assert isinstance(option, Option)
    assert option.bounds == {"ge": -MAX_REWARD, "le": MAX_REWARD}


def test_one_of_a_config_that_is_too_large(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rewards.correct must be >= -1e\+12, <= 1e\+12, got 1e"):
        fit_config(tmp_path, "rewards.correct=1e38")
