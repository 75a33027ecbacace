"""Seconds of named pieces of work, which a trace shows under the same names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the block's seconds to `seconds[name]`.

    Work that a GPU has not finished is not waited for: the block must end with a result that
    needs it, as the update of a network does with its gradient's norm.
    """
    start = time.monotonic()
    with torch.profiler.record_function(name):
        yield
    seconds[name] = seconds.get(name, 0.0) + time.monotonic() - start
