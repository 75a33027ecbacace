"""Scaled and capped logits: by hand, against dense autograd, and none bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from vapo.functional.logit_transforms import LogitTransform
from vapo.functional.logprobs import token_logprobs


def test_by_hand() -> None:
    # products 0 and 2 artanh(1/2) = ln 3; a cap of 2 makes them 0 and 2 * 1/2 = 1
    hidden = torch.ones(1, 1, dtype=torch.float64)
    weight = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    logprobs, _ = token_logprobs(
        hidden, weight, torch.tensor([1]), transform=LogitTransform(cap=2.0)
    )
    assert logprobs.item() == pytest.approx(1 - math.log(1 + math.e), abs=1e-12)
    # a scale of 2 makes them 0 and ln 9: probabilities 1/10 and 9/10
    logprobs, _ = token_logprobs(
        hidden, weight, torch.tensor([1]), transform=LogitTransform(scale=2.0)
    )
    assert logprobs.exp().item() == pytest.approx(0.9, abs=1e-12)


@pytest.mark.parametrize(
    "transform", [LogitTransform(scale=0.25), LogitTransform(cap=1.5), LogitTransform(0.5, 2.0)]
)
def test_values_and_gradients_are_those_of_dense_logits(transform: LogitTransform) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (7,))
    weights = torch.linspace(-1, 2, 7, dtype=torch.float64)
    logits = transform.scale * (hidden @ weight.T)
    if transform.cap is not None:
        logits = transform.cap * (logits / transform.cap).tanh()
    log_softmax = (logits / 0.7).log_softmax(dim=1)
    expected = log_softmax.gather(1, targets[:, None])[:, 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(dim=1)
    wanted = torch.autograd.grad((expected * weights + 0.3 * entropy).sum(), [hidden, weight])
    found = token_logprobs(
        hidden, weight, targets, temperature=0.7, transform=transform, chunk_size=3
    )
    torch.testing.assert_close(found, (expected, entropy), rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad((found[0] * weights + 0.3 * found[1]).sum(), [hidden, weight])
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-12)


def test_a_transform_that_changes_nothing_is_none_bit_for_bit() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5), torch.randn(11, 5)
    targets = torch.randint(11, (7,))
    plain = token_logprobs(hidden, weight, targets, temperature=0.7)
    neutral = token_logprobs(hidden, weight, targets, temperature=0.7, transform=LogitTransform())
    assert torch.equal(plain[0], neutral[0])
    assert torch.equal(plain[1], neutral[1])
