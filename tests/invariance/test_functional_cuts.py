"""The loss and gradient of a mini-batch do not depend on how it is cut, padded or ordered."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vapo.functional.losses import (
    aggregate,
    clipped_surrogate,
    positive_example_lm_loss,
    value_loss,
)
from vapo.functional.masking import loss_denominator
from vapo.functional.metrics import clip_fractions
from vapo.functional.surrogates import cispo_surrogate, gspo_surrogate

B, T = 12, 9
Loss = Callable[[dict[str, Tensor], Tensor, dict[str, int | None]], Tensor]
NO_DENOMINATORS: dict[str, int | None] = {"tokens": None, "responses": None, "correct_tokens": None}


def make_batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([9, 1, 4, 7, 2, 9, 3, 5, 0, 8, 6, 4])
    mask = torch.arange(T) < lengths[:, None]
    mask[0, 3] = False  # a gap
    rand = {
        key: torch.randn(B, T, dtype=torch.float64, generator=g)
        for key in ("old", "advantages", "targets", "noise")
    }
    correct = torch.tensor([True, False, False, True] + [False] * 5 + [True, False, True])
    return {**rand, "mask": mask, "correct": correct}


def policy(reduction) -> Loss:
    def loss(batch, x, denominators) -> Tensor:
        token_losses = clipped_surrogate(
            x, batch["old"], batch["advantages"], eps_low=0.2, eps_high=0.28
        )
        key = "tokens" if reduction == "token_mean" else "responses"
        return aggregate(
            token_losses, batch["mask"], reduction=reduction, denominator=denominators[key]
        )

    return loss


def gspo(batch, x, denominators) -> Tensor:
    mask = batch["mask"]
    token_losses = gspo_surrogate(
        x, batch["old"], batch["advantages"], mask, eps_low=0.05, eps_high=0.1
    )
    return aggregate(
        token_losses, mask, reduction="sequence_mean", denominator=denominators["responses"]
    )


def cispo(batch, x, denominators) -> Tensor:
    token_losses = cispo_surrogate(x, batch["old"], batch["advantages"], eps_low=None, eps_high=0.2)
    return aggregate(
        token_losses, batch["mask"], reduction="token_mean", denominator=denominators["tokens"]
    )


def critic(batch, x, denominators) -> Tensor:
    return value_loss(x, batch["targets"], batch["mask"], denominator=denominators["tokens"])


def positive(batch, x, denominators) -> Tensor:
    return positive_example_lm_loss(
        x, batch["mask"], batch["correct"], denominator=denominators["correct_tokens"]
    )


LOSSES = {
    "token_mean": policy("token_mean"),
    "sequence_mean": policy("sequence_mean"),
    "gspo": gspo,
    "cispo": cispo,
    "value": critic,
    "positive": positive,
}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def denominators_of(batch: dict[str, Tensor]) -> dict[str, int | None]:
    mask = batch["mask"]
    correct_mask = mask & batch["correct"][:, None]
    return {
        "tokens": int(loss_denominator(mask, reduction="token_mean")),
        "responses": int(loss_denominator(mask, reduction="sequence_mean")),
        "correct_tokens": int(loss_denominator(correct_mask, reduction="token_mean")),
    }


def start(batch: dict[str, Tensor]) -> Tensor:
    return (batch["old"] + 0.3 * batch["noise"]).requires_grad_()


def rows(batch: dict[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    return {key: x[index] for key, x in batch.items()}


def whole(loss: Loss, batch: dict[str, Tensor]) -> tuple[float, Tensor]:
    x = start(batch)
    total = loss(batch, x, NO_DENOMINATORS)
    (grad,) = torch.autograd.grad(total, x)
    return total.item(), grad


def cut(loss: Loss, batch, parts, denominators) -> tuple[float, Tensor]:
    x = start(batch)
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        total = total + loss(rows(batch, part), x[part], denominators)
    (grad,) = torch.autograd.grad(total, x)
    return total.item(), grad


@each_loss
@pytest.mark.parametrize("k", [2, 3, 5, 12])
def test_micro_batches_with_the_whole_denominator_add_up(loss: Loss, k: int) -> None:
    batch = make_batch()
    parts = torch.randperm(B, generator=torch.Generator().manual_seed(k)).chunk(k)
    value, grad = whole(loss, batch)
    cut_value, cut_grad = cut(loss, batch, parts, denominators_of(batch))
    assert cut_value == pytest.approx(value, abs=1e-12)
    torch.testing.assert_close(cut_grad, grad, rtol=0, atol=1e-13)


@each_loss
def test_negative_control_micro_batches_with_their_own_denominators_do_not(loss: Loss) -> None:
    batch = make_batch()
    value, grad = whole(loss, batch)
    parts = torch.arange(B).chunk(4)
    cut_value, cut_grad = cut(loss, batch, parts, NO_DENOMINATORS)
    assert abs(cut_value / 4 - value) > 1e-3  # not even after dividing by the number of parts
    assert (cut_grad / 4 - grad).abs().max() > 1e-3


@each_loss
def test_order_of_rows(loss: Loss) -> None:
    batch = make_batch()
    order = torch.randperm(B, generator=torch.Generator().manual_seed(1))
    value, grad = whole(loss, batch)
    shuffled_value, shuffled_grad = whole(loss, rows(batch, order))
    assert shuffled_value == pytest.approx(value, abs=1e-13)
    torch.testing.assert_close(shuffled_grad, grad[order], rtol=0, atol=1e-15)


@each_loss
@pytest.mark.parametrize("garbage", [0.0, 1e30, float("inf"), -float("inf"), float("nan")])
def test_amount_and_content_of_padding(loss: Loss, garbage: float) -> None:
    batch = make_batch()
    value, grad = whole(loss, batch)
    mask = torch.nn.functional.pad(batch["mask"], (0, 5))
    padded = {"mask": mask, "correct": batch["correct"]}
    for key in ("old", "advantages", "targets"):
        wide = torch.nn.functional.pad(batch[key], (0, 5))
        padded[key] = torch.where(mask, wide, garbage)
    x = torch.nn.functional.pad(start(batch).detach(), (0, 5))
    x = torch.where(mask, x, -garbage).requires_grad_()
    padded_loss = loss(padded, x, NO_DENOMINATORS)
    (padded_grad,) = torch.autograd.grad(padded_loss, x)
    assert padded_loss.item() == pytest.approx(value, abs=1e-13)
    torch.testing.assert_close(padded_grad[:, :T], grad, rtol=0, atol=1e-15)
    assert torch.equal(padded_grad[:, T:], torch.zeros(B, 5, dtype=torch.float64))


def test_on_the_first_mini_batch_the_ratio_is_one_and_nothing_is_clipped() -> None:
    batch = make_batch()
    x = batch["old"].clone().requires_grad_()
    token_losses = clipped_surrogate(
        x, batch["old"], batch["advantages"], eps_low=0.2, eps_high=0.28
    )
    assert torch.equal(token_losses, -batch["advantages"])
    (grad,) = torch.autograd.grad(token_losses.sum(), x)
    assert torch.equal(grad, -batch["advantages"])
    counts = clip_fractions(
        x, batch["old"], batch["advantages"], batch["mask"], eps_low=0.2, eps_high=0.28
    )
    assert [int(c) for c in counts] == [0, 0]
