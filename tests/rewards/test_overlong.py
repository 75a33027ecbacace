"""DAPO's soft overlong punishment against its formula, by hand."""

from __future__ import annotations

import pytest
import torch

from vapo.rewards.overlong import soft_overlong_punishment


def test_ramp_of_the_paper():
    lengths = torch.tensor([0, 1, 16384, 16385, 18432, 20479, 20480, 30000])
    punishment = soft_overlong_punishment(lengths, max_response_tokens=20480, cache_tokens=4096)
    expected = [0.0, 0.0, 0.0, -1 / 4096, -0.5, -4095 / 4096, -1.0, -1.0]
    assert punishment.tolist() == expected
    assert punishment.dtype == torch.float32


def test_list_of_lengths_and_a_ramp_over_everything():
    punishment = soft_overlong_punishment([0, 5, 10], max_response_tokens=10, cache_tokens=10)
    assert punishment.tolist() == [0.0, -0.5, -1.0]


@pytest.mark.parametrize("cache_tokens", [0, 11])
def test_ramp_outside_the_budget(cache_tokens: int):
    with pytest.raises(ValueError, match="cache_tokens"):
        soft_overlong_punishment([1], max_response_tokens=10, cache_tokens=cache_tokens)
