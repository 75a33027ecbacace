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
from functools import partial
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
        environment, restores = dict(os.environ), _restores()
        _replace_environment(self._environment)
        try:
            yield
        finally:
            self._environment = dict(os.environ)
            _replace_environment(environment)
            for restore in restores:
                restore()


def _restores() -> list[Callable[[], object]]:
    """What brings the process back to where it is now, but for its environment."""
    set_num_threads, excepthook = torch.set_num_threads, sys.excepthook

    def restore_functions() -> None:
        torch.set_num_threads, sys.excepthook = set_num_threads, excepthook

    restores: list[Callable[[], object]] = [
        restore_functions,
        partial(set_num_threads, torch.get_num_threads()),
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(sys.setrecursionlimit, sys.getrecursionlimit()),
        partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        partial(torch.set_default_dtype, torch.get_default_dtype()),
    ]
    if hasattr(os, "sched_setaffinity"):
        restores.append(partial(os.sched_setaffinity, 0, os.sched_getaffinity(0)))
    if torch.cuda.is_initialized():
        restores.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if gc.get_freeze_count() == 0:
        restores.append(gc.unfreeze)
    return restores


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
