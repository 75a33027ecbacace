"""Float32 products of inputs that a processor may round, where it is faster so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def rounded_inputs(*, on_cpu: bool) -> Iterator[None]:
    """Let float32 products in the block round their inputs: to bfloat16 on a CPU, to TF32 on a GPU.

    Sums and results stay float32. TF32 has 10 bits of mantissa where bfloat16 has 7. The setting is
    the whole process's, so it must not be used where another thread multiplies meanwhile
    (`vapo.networks.precision.may_round_products`), and torch's older questions for it
    (`torch.get_float32_matmul_precision`) raise in the block.
    """
    backend: Any = torch.backends.mkldnn if on_cpu else torch.backends.cuda  # no stub has both
    before = backend.matmul.fp32_precision
    backend.matmul.fp32_precision = "bf16" if on_cpu else "tf32"
    try:
        yield
    finally:
        backend.matmul.fp32_precision = before
