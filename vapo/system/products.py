"""Lets a CPU round the inputs of float32 products, where that is faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def rounded_inputs() -> Iterator[None]:
    """Let a CPU's float32 products in the block round their inputs to bfloat16.

    Sums and results stay float32. The setting holds for the whole process, so no other thread may
    multiply meanwhile (`vapo.networks.precision.may_round_products`). In the block torch's older
    getter, `torch.get_float32_matmul_precision`, raises an error.
    """
    backend: Any = torch.backends.mkldnn  # the stub does not have `matmul`
    previous_precision = backend.matmul.fp32_precision
    backend.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        backend.matmul.fp32_precision = previous_precision
