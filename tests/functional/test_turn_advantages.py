"""GAE over turns: hand-computed literals in float64, and what it must equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vapo.functional.advantages import decoupled_gae, gae, monte_carlo_returns
from vapo.functional.turn_advantages import decoupled_turn_gae, on_whole_turns, turn_numbers

NAN = float("nan")


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def mask(text: str) -> Tensor:
    return torch.tensor([[c != "." for c in text]])


# an observation, a turn of two tokens, an observation, a turn of one, one of three: "s" starts it
SAMPLED, STARTS = mask(".sx.ssxx"), torch.tensor([[c == "s" for c in ".sx.ssxx"]])
REWARDS = row(0, 0.25, 0.25, 0, -1, 0, 0, 2)
VALUES = row(999, 0.5, 999, NAN, 1.5, 0.75, NAN, 999)


def test_turns_by_hand() -> None:
    # gamma 1/2, lambda of the policy 1/2, of the critic 1; r = [0.5, -1, 2], V = [0.5, 1.5, 0.75]
    # delta = [0.5 + 0.75 - 0.5, -1 + 0.375 - 1.5, 2 - 0.75] = [0.75, -2.125, 1.25]
    # A_3 = 1.25; A_2 = -2.125 + 1.25 / 4 = -1.8125; A_1 = 0.75 - 1.8125 / 4 = 0.296875
    # R_3 = 2; R_2 = -1 + 1 = 0; R_1 = 0.5 + 0
    advantages, targets = decoupled_turn_gae(
        REWARDS, VALUES, SAMPLED, STARTS, gamma=0.5, lambda_policy=0.5, lambda_critic=1.0
    )
    assert advantages.tolist() == [
        [0, 0.296875, 0.296875, 0, -1.8125, 1.25, 1.25, 1.25],
    ]
    assert targets.tolist() == [[0, 0.5, 0, 0, 0, 2, 0, 0]]
    assert advantages.dtype == torch.float64


def test_the_critics_own_lambda_by_hand() -> None:
    # gamma 1/2, lambda of the critic 1/4: A_3 = 1.25; A_2 = -2.125 + 1.25 / 8 = -1.96875;
    # A_1 = 0.75 - 1.96875 / 8 = 0.50390625; targets are A + V
    advantages, targets = decoupled_turn_gae(
        REWARDS, VALUES, SAMPLED, STARTS, gamma=0.5, lambda_policy=0.0, lambda_critic=0.25
    )
    assert advantages[0, [1, 4, 5]].tolist() == [0.75, -2.125, 1.25]
    assert targets[0, [1, 4, 5]].tolist() == [1.00390625, -0.46875, 2.0]
    assert targets[0, [0, 2, 3, 6, 7]].tolist() == [0.0] * 5


def test_a_lambda_of_each_row_and_rows_of_unequal_turns() -> None:
    one: dict[str, Any] = {"gamma": 1.0, "lambda_critic": 1.0}
    pair: dict[str, Any] = {
        "token_rewards": torch.cat([REWARDS, row(0, 0, 1, 0, 0, 0, 0, 0)]),
        "values": torch.cat([VALUES, row(0.25, 9, 9, 9, 9, 9, 9, 9)]),
        "response_mask": torch.cat([SAMPLED, mask("sxx.....")]),
        "turn_starts": torch.cat([STARTS, mask("s.......")]),
    }
    lambdas = torch.tensor([[0.5], [0.0]], dtype=torch.float64)
    both, targets = decoupled_turn_gae(**pair, lambda_policy=lambdas, **one)
    alone, _ = decoupled_turn_gae(REWARDS, VALUES, SAMPLED, STARTS, lambda_policy=0.5, **one)
    assert torch.equal(both[:1], alone)
    assert both[1].tolist() == [0.75, 0.75, 0.75, 0, 0, 0, 0, 0]
    assert targets[1].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("lambda_critic", [0.0, 0.7, 1.0])
def test_turns_of_one_token_are_tokens(lambda_critic: float) -> None:
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 5, 40, dtype=torch.float64, generator=generator)
    sampled = torch.rand(5, 40, generator=generator) > 0.4
    sampled[4] = False  # a row without a token
    numbers: dict[str, Any] = {
        "gamma": 0.9,
        "lambda_policy": torch.rand(5, 1, dtype=torch.float64, generator=generator),
        "lambda_critic": lambda_critic,
    }
    ours = decoupled_turn_gae(rewards, values, sampled, sampled, **numbers)
    theirs = decoupled_gae(rewards, values, sampled, **numbers)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_whatever_stands_beside_the_turns_does_not_matter() -> None:
    """Values inside of a turn, and everything on observations, padding included."""
    numbers: dict[str, Any] = {"gamma": 0.5, "lambda_policy": 0.5, "lambda_critic": 0.5}
    plain = decoupled_turn_gae(REWARDS, VALUES, SAMPLED, STARTS, **numbers)
    wide = torch.nn.functional.pad(SAMPLED, (3, 5)), torch.nn.functional.pad(STARTS, (3, 5))
    rewards = torch.nn.functional.pad(torch.where(SAMPLED, REWARDS, NAN), (3, 5), value=NAN)
    values = torch.nn.functional.pad(torch.where(STARTS, VALUES, -1e30), (3, 5), value=NAN)
    padded = decoupled_turn_gae(rewards, values, *wide, **numbers)
    for found, expected in zip(padded, plain, strict=True):
        assert torch.equal(found[:, 3:-5], expected)
        assert float(found[:, :3].abs().sum() + found[:, -5:].abs().sum()) == 0


def test_bad_marks_are_named() -> None:
    numbers: dict[str, Any] = {"gamma": 1, "lambda_policy": 1, "lambda_critic": 1}
    with pytest.raises(ValueError, match="not sampled: token 0 of row 0"):
        decoupled_turn_gae(REWARDS, VALUES, SAMPLED, STARTS | ~SAMPLED, **numbers)
    late = STARTS.clone()
    late[0, 1] = False
    with pytest.raises(ValueError, match="before the first turn: token 1 of row 0"):
        turn_numbers(SAMPLED, late)
    with pytest.raises(ValueError, match="lambda must be in"):
        decoupled_turn_gae(
            REWARDS, VALUES, SAMPLED, STARTS, gamma=1, lambda_policy=1.5, lambda_critic=1
        )


def test_a_turns_number_on_each_of_its_tokens() -> None:
    assert turn_numbers(SAMPLED, STARTS).tolist() == [[-1, 0, 0, -1, 1, 2, 2, 2]]
    spread = on_whole_turns(VALUES, SAMPLED, STARTS)
    assert spread.tolist() == [[0, 0.5, 0.5, 0, 1.5, 0.75, 0.75, 0.75]]


def test_gae_skips_observations_by_sao() -> None:
    """The check numbers of SAO's skip-observation GAE (arXiv 2607.07508)."""
    rewards, values, sampled = row(0, 0, 1), row(0.2, 999, 0.4), mask("x.x")
    advantages, returns = decoupled_gae(
        rewards, values, sampled, gamma=1.0, lambda_policy=1.0, lambda_critic=1.0
    )
    torch.testing.assert_close(advantages, row(0.8, 0, 0.6), rtol=0, atol=1e-15)
    assert returns.tolist() == [[1, 0, 1]]
    found = gae(row(0, 0, 1, 0), row(0, NAN, 0, NAN), mask("x.x."), gamma=1.0, lambda_=0.5)
    assert found.tolist() == [[0.5, 0, 1, 0]]
    assert monte_carlo_returns(rewards, sampled, gamma=0.5).tolist() == [[0.5, 0, 1]]
