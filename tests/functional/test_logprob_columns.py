"""The columns of sampled log-probs: by hand, causal, and blind to what was not sampled."""

from __future__ import annotations

import math

import pytest
import torch

from vapo.functional.logprob_columns import NUM_LOGPROB_COLUMNS, logprob_columns


def test_by_hand() -> None:
    """Probabilities 0.9, 0.1, then an observation, then 0.4."""
    logprobs = torch.tensor([[0.9, 0.1, 1.0, 0.4, 1.0]]).log()
    is_sampled = torch.tensor([[True, True, False, True, True]])
    found = logprob_columns(logprobs, is_sampled)
    assert found.shape == (1, 5, NUM_LOGPROB_COLUMNS)
    least, total = [1.0, 0.9, 0.1, 0.1, 0.1], [1.0, 0.9, 0.09, 0.09, 0.036]
    unlikely, number = [0, 0, 1, 1, 2], [0, 1, 2, 2, 3]
    expected = []
    for m, s, c, n in zip(least, total, unlikely, number, strict=True):
        t = n / (n + 32)
        sampled = [m, math.log(m) / 4, s, math.log(s) / 16, c / 3, float(c > 0)]
        expected.append([*sampled, t, t * m, t * s, math.exp(-n / 8)])
    torch.testing.assert_close(found[0], torch.tensor(expected))


def test_columns_end_where_they_are_cut() -> None:
    found = logprob_columns(torch.full((1, 9), -50.0), torch.ones(1, 9, dtype=torch.bool))
    assert found[0, -1].tolist() == pytest.approx([0, -1, 0, -1, 1, 1, 0.2, 0, 0, math.exp(-1)])


def test_no_length_leads_out_of_the_bounds() -> None:
    found = logprob_columns(torch.zeros(1, 20_000), torch.ones(1, 20_000, dtype=torch.bool))
    assert found.abs().max() == 1
    assert found[0, -1, 6] > 0.99


def test_a_state_knows_no_token_from_itself_on() -> None:
    torch.manual_seed(0)
    logprobs, is_sampled = -torch.rand(3, 8), torch.rand(3, 8) < 0.8
    before = logprob_columns(logprobs, is_sampled)
    logprobs[:, 5:] -= 3.0
    after = logprob_columns(logprobs, is_sampled)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


def test_what_was_not_sampled_changes_nothing() -> None:
    torch.manual_seed(0)
    logprobs, is_sampled = -torch.rand(3, 8), torch.rand(3, 8) < 0.5
    noise = torch.where(is_sampled, logprobs, -9.0)
    one, other = logprob_columns(logprobs, is_sampled), logprob_columns(noise, is_sampled)
    assert torch.equal(one, other)
