"""What vLLM changes in its process, in force only while vLLM starts, sleeps, or takes weights.

Seen with vLLM 0.32 when an engine is made: environment variables (LD_PRELOAD, LOCAL_WORLD_SIZE,
TORCHINDUCTOR_*, NUMEXPR_MAX_THREADS and its own), the number of torch threads and
`torch.set_num_threads` itself, the random states of torch, Python and numpy, CPU affinity,
`sys.excepthook` and the recursion limit. The trainer's children and its random numbers must not
depend on the engine in the same process.

Nothing is swapped around requests and steps: vLLM has read its variables by then, and requests
with seeds draw from no process-wide generator. So whatever runs between two steps, and each child
that it starts, sees the trainer's own state. A step that compiles something sets variables, which
are taken back after it (`environment_kept`). Steps that do draw from a process-wide generator have
one of their own (`OwnDraws`).

Left as vLLM makes them: the garbage collector's frozen heap, until the engine is closed; and on a
CPU the stand-ins for `torch.cuda` streams and events, and for `pin_memory`, which its steps need
and a CPU trainer does not use. Where no process group exists vLLM makes one of a single process;
`close` of the engine takes it down.
"""

from __future__ import annotations

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
from torch import Tensor

from vapo.system.private_attributes import environment_bytes

# FlashInfer's sampler compiles itself with nvcc, which torch's wheels do not bring. vLLM gives it
# no request that has a seed, so no response would come from it.
WITHOUT_NVCC = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
_FORCED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the engine's core in this process
# No banners, no telemetry, and no dump of the whole batch before an error that takes one line;
# what the user has set is kept.
_DEFAULTS = {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_NO_USAGE_STATS": "1", **WITHOUT_NVCC}


class ProcessState:
    """Keeps the environment that a vLLM engine of this process needs, apart from the trainer's."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._environment = {**_DEFAULTS, **os.environ, **_FORCED, **settings}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside the block, set the engine's environment variables.

        Afterwards the trainer's variables, random states and other process-wide settings are
        restored exactly. What the block has changed in the engine's environment is kept for the
        next time.
        """
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
    """Return functions that restore the process-wide settings as they are now.

    They restore all that vLLM changes except environment variables.
    """
    set_num_threads, excepthook = torch.set_num_threads, sys.excepthook

    def restore_functions() -> None:
        torch.set_num_threads, sys.excepthook = set_num_threads, excepthook

    restores: list[Callable[[], object]] = [
        restore_functions,
        partial(set_num_threads, torch.get_num_threads()),
        partial(_set_torch_states, _torch_states()),
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(sys.setrecursionlimit, sys.getrecursionlimit()),
        partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        partial(torch.set_default_dtype, torch.get_default_dtype()),
    ]
    if hasattr(os, "sched_setaffinity"):
        restores.append(partial(os.sched_setaffinity, 0, os.sched_getaffinity(0)))
    return restores


@contextmanager
def environment_kept() -> Iterator[None]:
    """Restore after the block the environment variables that it has changed.

    If it has changed none, this takes two microseconds.
    """
    original = dict(environment_bytes())
    try:
        yield
    finally:
        if environment_bytes() != original:
            _replace_environment({os.fsdecode(k): os.fsdecode(v) for k, v in original.items()})


class OwnDraws:
    """Random states of torch for an engine whose steps draw from the process-wide generators.

    With them the trainer's random numbers do not depend on the engine.
    """

    def __init__(self) -> None:
        self._states: tuple[Tensor, list[Tensor]] | None = None

    def begin(self, seed: int) -> None:
        """Set the engine's random states by a seed."""
        trainers = _torch_states()
        torch.manual_seed(seed)
        self._states = _torch_states()
        _set_torch_states(trainers)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Inside the block, draw from the engine's random states instead of the trainer's."""
        trainers = _torch_states()
        if self._states is not None:
            _set_torch_states(self._states)
        try:
            yield
        finally:
            self._states = _torch_states()
            _set_torch_states(trainers)


def _torch_states() -> tuple[Tensor, list[Tensor]]:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), on_gpus


def _set_torch_states(states: tuple[Tensor, list[Tensor]]) -> None:
    on_cpu, on_gpus = states
    torch.set_rng_state(on_cpu)
    if on_gpus:
        torch.cuda.set_rng_state_all(on_gpus)


def _replace_environment(environment: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextmanager
def default_group_kept(is_ours: bool) -> Iterator[None]:
    """Inside the block, let nobody destroy the process group if it is the trainer's (`is_ours`).

    vLLM's shutdown would.
    """
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
