"""Component token_level_loss: every token of the mini-batch weighs the same."""

import pytest
import torch

from vapo.functional.losses import aggregate

MASK = torch.arange(100) < torch.tensor([100, 4])[:, None]  # responses of 100 and of 4 tokens


def gradient(reduction) -> torch.Tensor:
    losses = torch.ones(2, 100, dtype=torch.float64, requires_grad=True)
    aggregate(losses, MASK, reduction=reduction).backward()
    assert losses.grad is not None
    return losses.grad


def test_on_is_the_sum_over_tokens_by_their_number() -> None:
    losses = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert aggregate(losses, mask, reduction="token_mean").item() == 4.0  # 16 / 4


def test_off_is_the_mean_over_responses_of_their_means_bitwise() -> None:
    losses = torch.randn(2, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = torch.stack([losses[0, :100].sum() / 100, losses[1, :4].sum() / 4]).sum() / 2
    padded = torch.where(MASK, losses, 0.0)
    plain_bitwise = (padded.sum(dim=1) / MASK.sum(dim=1)).sum() / 2
    off = aggregate(losses, MASK, reduction="sequence_mean")
    assert torch.equal(off, plain_bitwise)
    assert off.item() == pytest.approx(plain.item(), abs=1e-14)


def test_off_by_hand() -> None:
    losses = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert aggregate(losses, mask, reduction="sequence_mean").item() == 6.0  # (2 + 10) / 2


def test_both_agree_when_all_responses_are_equally_long() -> None:
    losses = torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.bool)
    assert aggregate(losses, mask, reduction="token_mean").item() == 3.0
    assert aggregate(losses, mask, reduction="sequence_mean").item() == 3.0


def test_on_weighs_every_token_alike() -> None:
    weights = gradient("token_mean")
    assert weights[MASK].tolist() == pytest.approx([1 / 104] * 104, abs=1e-15)
    assert weights[~MASK].abs().max().item() == 0.0


def test_negative_control_off_a_token_of_a_long_response_hardly_counts() -> None:
    # 1/(2 * 100) against 1/(2 * 4): a bad pattern in a long response is 25 times cheaper.
    weights = gradient("sequence_mean")
    assert weights[0, 0].item() == pytest.approx(1 / 200, abs=1e-15)
    assert weights[1, 0].item() == pytest.approx(1 / 8, abs=1e-15)
    # The same fault, one bad token in every hundred, weighs nothing more for going on longer:
    # the long response's whole gradient equals the short one's.
    assert weights[0].sum().item() == pytest.approx(weights[1].sum().item(), abs=1e-14)
    on = gradient("token_mean")
    assert on[0].sum().item() == pytest.approx(25 * on[1].sum().item(), abs=1e-14)
