"""Scale and cap logits, and multiply gradients by the slope of that function."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class LogitTransform(NamedTuple):
    """The function by which an architecture turns its output layer's products x into logits y.

        cap is None: y = scale * x        else: y = cap * tanh(scale * x / cap)
        dy / dx = scale                         dy / dx = scale * (1 - (y / cap)^2)

    >>> import torch
    >>> LogitTransform(scale=2.0, cap=1.0).apply_(torch.tensor([0.0, 50.0]))
    tensor([0., 1.])
    """

    scale: float = 1.0
    cap: float | None = None

    def apply_(self, logits: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
        """Turn the products x of the output layer into logits y, in place, and return them."""
        if self.cap is None:
            return logits.mul_(self.scale)
        return logits.mul_(self.scale / self.cap).tanh_().mul_(self.cap)

    def times_slope_(
        self, gradient: Float[Tensor, "*n V"], logits: Float[Tensor, "*n V"] | None
    ) -> Float[Tensor, "*n V"]:
        """Turn the gradient with respect to y into the one with respect to x: multiply by dy / dx.

        `gradient` is changed in place and returned.

        Args:
            logits: y, which is overwritten. It may be None if there is no cap.
        """
        if self.cap is not None:
            assert logits is not None
            gradient.mul_(logits.div_(self.cap).square_().neg_().add_(1))
        return gradient.mul_(self.scale)
