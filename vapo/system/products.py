"""Float32 products of inputs that a processor may round, where it is faster so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def rounded_inputs() -> Iterator[None]:
    """Let a CPU's float32 products in the block round their inputs to bfloat16.

    Sums and results stay float32. The setting is the whole process's, so it must not be used where
    another thread multiplies meanwhile (`vapo.networks.precision.may_round_products`), and torch's
    older questions for it (`torch.get_float32_matmul_precision`) raise in the block.
    """
    backend: Any = torch.backends.mkldnn  # the stub does not have `matmul`
    previous_precision = backend.matmul.fp32_precision
    backend.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        backend.matmul.fp32_precision = previous_precision
