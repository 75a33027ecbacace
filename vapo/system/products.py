"""A CPU's float32 products of inputs that it may round to bfloat16."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_before: list[str] = []  # what the setting was as each product under way began


@contextmanager
def bfloat16_inputs() -> Iterator[None]:
    """Let a CPU round the inputs of float32 products to bfloat16 in the block.

    The setting is the process's, and a thread that samples has such products beside the trainer's:
    the first that begins sets it, and the last that ends puts it back, in whatever order they do.
    None waits for another. It is not set for good, since it would round every other product, too;
    those of other threads it may round meanwhile.
    """
    backend: Any = torch.backends.mkldnn  # its stub lacks the attribute
    with _lock:
        _before.append(backend.matmul.fp32_precision)
        backend.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        with _lock:
            backend.matmul.fp32_precision = _before.pop()
