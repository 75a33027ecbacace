"""What vLLM changes in its process, in force only while vLLM runs.

Seen with vLLM 0.32 (creating an engine, and each step): environment variables (LD_PRELOAD,
LOCAL_WORLD_SIZE, TORCHINDUCTOR_*, NUMEXPR_MAX_THREADS and its own), the number of torch threads
and `torch.set_num_threads` itself, the random states of torch, Python and numpy, CPU affinity,
`sys.excepthook`, the recursion limit, and a frozen garbage collector heap. The trainer's children
and its random numbers must not depend on the engine in the same process.

Left as vLLM makes them on a CPU: the stand-ins for `torch.cuda` streams and events, and for
`pin_memory`, which its steps need and a CPU trainer does not use. Where no process group exists
vLLM makes one of a single process; `close` of the engine takes it down.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_FORCED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the engine's core in this process
# No banners, no telemetry, and no dump of the whole batch before an error that takes one line;
# what the user has set is kept.
_DEFAULTS = {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_NO_USAGE_STATS": "1"}


class ProcessState:
    """Swaps between the trainer's process-wide state and the engine's."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._environment = {**_DEFAULTS, **os.environ, **_FORCED, **settings}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Set the engine's environment inside the block, and restore it exactly afterwards."""
        before = _Snapshot.take()
        _replace_environment(self._environment)
        try:
            yield
        finally:
            self._environment = dict(os.environ)
            before.restore()


@dataclass(frozen=True)
class _Snapshot:
    environment: dict[str, str]
    num_threads: int
    set_num_threads: Callable[[int], None]
    affinity: set[int] | None
    torch_random: torch.Tensor
    cuda_random: list[torch.Tensor]
    python_random: Any
    numpy_random: Any
    excepthook: Any
    recursion_limit: int
    matmul_precision: str
    default_dtype: torch.dtype
    num_frozen: int

    @staticmethod
    def take() -> _Snapshot:
        return _Snapshot(
            environment=dict(os.environ),
            num_threads=torch.get_num_threads(),
            set_num_threads=torch.set_num_threads,
            affinity=os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
            torch_random=torch.get_rng_state(),
            cuda_random=torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            python_random=random.getstate(),
            numpy_random=np.random.get_state(),
            excepthook=sys.excepthook,
            recursion_limit=sys.getrecursionlimit(),
            matmul_precision=torch.get_float32_matmul_precision(),
            default_dtype=torch.get_default_dtype(),
            num_frozen=gc.get_freeze_count(),
        )

    def restore(self) -> None:
        _replace_environment(self.environment)
        torch.set_num_threads = self.set_num_threads  # type: ignore[assignment]
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        if self.affinity is not None and os.sched_getaffinity(0) != self.affinity:
            os.sched_setaffinity(0, self.affinity)
        torch.set_rng_state(self.torch_random)
        if self.cuda_random:
            torch.cuda.set_rng_state_all(self.cuda_random)
        random.setstate(self.python_random)
        np.random.set_state(self.numpy_random)
        sys.excepthook = self.excepthook
        sys.setrecursionlimit(self.recursion_limit)
        if torch.get_float32_matmul_precision() != self.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
        if torch.get_default_dtype() != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        if self.num_frozen == 0 and gc.get_freeze_count():
            gc.unfreeze()


def _replace_environment(environment: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextmanager
def default_group_kept(is_ours: bool) -> Iterator[None]:
    """Keep vLLM's shutdown from destroying the trainer's process group, if `is_ours`."""
    if not is_ours:
        yield
        return
    destroy = dist.destroy_process_group

    def destroy_theirs(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    dist.destroy_process_group = destroy_theirs
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
