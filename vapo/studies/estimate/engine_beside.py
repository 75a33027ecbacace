"""Decide whether a vLLM engine stays awake while the networks train on the same GPU.

An engine that sleeps is copied to the host and back in every iteration. If the GPU has room for the
engine and for the training of the networks, the copies gain nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from vapo.config import FitConfig
from vapo.config.engines import ColocatedVllm, VllmEngine
from vapo.errors import UserError
from vapo.studies.estimate.memory import MemoryEstimate
from vapo.system.host_memory import GIB

_CONTEXT = 1.5 * GIB  # what CUDA and its libraries take before the first tensor
_GRAPHS = 2.0 * GIB  # what CUDA graphs and activations of an engine take beside its KV cache
_ERROR = 1.1  # training may take a tenth more than estimated


@dataclass(frozen=True)
class Sleep:
    """The decision for `sleep_level: auto`: the level, and a line that gives the reason."""

    level: Literal[0, 1]
    line: str


def choose_sleep(*, device: float, engine: float, training: float) -> Sleep:
    """Decide whether vLLM's engine sleeps while the networks train.

    It stays awake (level 0) if its memory and training's, with a margin, fit the GPU together; else
    it sleeps (level 1). All sizes are in bytes.

    Args:
        device: the memory of the GPU.
        engine: what the engine holds while it is awake.
        training: what training holds at its peak.

    >>> choose_sleep(device=80 * 2**30, engine=40 * 2**30, training=10 * 2**30).level
    0
    """
    total = engine + training * _ERROR + _CONTEXT
    fits = total <= device
    figures = (
        f"{engine / GIB:.1f} GiB of the engine and about {training / GIB:.1f} of training "
        f"{'fit' if fits else 'do not fit'} the GPU's {device / GIB:.1f} together"
    )
    verb = "stays awake while the networks train" if fits else "sleeps while the networks train"
    return Sleep(0 if fits else 1, f"vLLM {verb}: {figures} (rollouts.vllm.sleep_level)")


def training_bytes(estimate: MemoryEstimate) -> float:
    """Return the most bytes that a GPU holds in a stage other than sampling."""
    stages = estimate.stages.items()
    return max(sum(parts.values()) for stage, parts in stages if stage != "sampling")


def with_sleep_level(
    config: FitConfig,
    estimated: Callable[[FitConfig], MemoryEstimate],
    tell: Callable[[str], None],
) -> FitConfig:
    """Return the config with 0 or 1 in place of `sleep_level: auto`, by the memory of this GPU.

    The config is returned unchanged if its level is a number already, or if there is no GPU.

    Args:
        estimated: estimates the memory of a config.
        tell: called with a line that gives the reason.
    """
    rollouts = config.rollouts
    if not isinstance(rollouts, VllmEngine) or rollouts.vllm.sleep_level != "auto":
        return config
    if config.trainer.accelerator == "cpu" or not torch.cuda.is_available():
        return config
    device = float(torch.cuda.get_device_properties(0).total_memory)
    try:
        sleep = _estimated_sleep(config, rollouts, device, estimated)
    except UserError as error:
        sleep = Sleep(1, f"vLLM sleeps while the networks train: no estimate: {error}")
    tell(sleep.line)
    return _with_vllm(config, replace(rollouts.vllm, sleep_level=sleep.level))


def _with_vllm(config: FitConfig, vllm: ColocatedVllm) -> FitConfig:
    changed = copy.copy(config)
    changed.rollouts = copy.copy(config.rollouts)
    vars(changed.rollouts)["vllm"] = vllm
    return changed


def _estimated_sleep(
    config: FitConfig,
    rollouts: VllmEngine,
    device: float,
    estimated: Callable[[FitConfig], MemoryEstimate],
) -> Sleep:
    options = rollouts.vllm
    # An estimate needs the size of a cache, even if only training's stages are read of it.
    with_cache = replace(options, kv_cache_memory_bytes=options.kv_cache_memory_bytes or 1)
    estimate = estimated(_with_vllm(config, with_cache))
    engine = options.gpu_memory_utilization * device
    if options.kv_cache_memory_bytes is not None:
        sampling = estimate.stages["sampling"]
        engine = sum(size for part, size in sampling.items() if part.startswith("vLLM")) + _GRAPHS
    return choose_sleep(device=device, engine=engine, training=training_bytes(estimate))
