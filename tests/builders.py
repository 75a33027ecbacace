"""Tensors as tests write them and compare them, and a port for a server."""

from __future__ import annotations

import socket

import torch
from torch import Tensor


def f64(*rows: list[float]) -> Tensor:
    """A matrix of double precision by its rows."""
    return torch.tensor(rows, dtype=torch.float64)


def mask(*rows: str) -> Tensor:
    """A mask by its rows, in which an x is True."""
    return torch.tensor([[c == "x" for c in row] for row in rows])


def equal(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    """Fail unless no two entries differ by more than `atol`."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    """The gradient of the sum of a loss by a leaf."""
    (found,) = torch.autograd.grad(loss.sum(), leaf)
    return found


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
