"""Rules between the keys of the sampling engine: an option that would be ignored is an error."""

from __future__ import annotations

import dataclasses
from typing import Any

from vapo.config.engines import VllmConfig
from vapo.config.problem import Problem

_VLLM = "rollouts.vllm"
# A server is started with its own.
_COLOCATED_ONLY = (
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "enforce_eager",
    "tensor_parallel_size",
    "sleep_level",
    "engine_args",
)


def _changed(vllm: VllmConfig) -> list[str]:
    defaults = VllmConfig()
    changed = []
    for field in dataclasses.fields(vllm):
        value = getattr(vllm, field.name)
        if value != getattr(defaults, field.name):
            inner = f".{next(iter(value))}" if isinstance(value, dict) else ""
            changed.append(field.name + inner)
    return changed


def vllm_options_are_used(config: Any) -> Problem | None:
    changed = _changed(config.rollouts.vllm)
    if config.rollouts.engine == "vllm" or not changed:
        return None
    key = f"{_VLLM}.{changed[0]}"
    return Problem(
        (key, "rollouts.engine"),
        f"{key} has no effect with rollouts.engine={config.rollouts.engine}: set "
        "rollouts.engine=vllm, or leave it out",
    )


def server_options_are_used(config: Any) -> Problem | None:
    vllm: VllmConfig = config.rollouts.vllm
    key, mode = f"{_VLLM}.server_urls", f"{_VLLM}.mode"
    if config.rollouts.engine != "vllm":
        return None
    if vllm.mode == "colocated":
        if vllm.server_urls is None:
            return None
        return Problem((key, mode), f"{key} has no effect: set {mode}=server")
    if vllm.server_urls is None:
        return Problem((mode, key), f"{mode}=server needs {key}, where the engines listen")
    for name in _changed(vllm):
        if name.partition(".")[0] in _COLOCATED_ONLY:
            return Problem(
                (f"{_VLLM}.{name}", mode),
                f"{_VLLM}.{name} has no effect with {mode}=server: give it to `vapo "
                "rollout-server`",
            )
    return None


def server_urls_are_addresses(config: Any) -> Problem | None:
    urls, key = config.rollouts.vllm.server_urls, f"{_VLLM}.server_urls"
    for url in () if urls is None else urls.split(","):
        scheme, _, rest = url.strip().partition("://")
        if scheme != "http" or not rest.partition(":")[2].isdigit():
            return Problem((key,), f"{key}: {url.strip()!r} is not like http://gpu2:8100")
    return None


def engine_parts_fill_a_host(config: Any) -> Problem | None:
    """The parts of an engine exchange activations in every layer: not over a network of hosts."""
    parts = config.rollouts.vllm.tensor_parallel_size
    if config.rollouts.engine != "vllm" or config.trainer.devices % parts == 0:
        return None
    key = f"{_VLLM}.tensor_parallel_size"
    return Problem(
        (key, "trainer.devices"),
        f"{key} {parts} does not divide trainer.devices {config.trainer.devices}: the processes "
        "of a host are shared out to engines without remainder",
    )


def vllm_temperature_is_kept(config: Any) -> Problem | None:
    """vLLM raises a lower temperature to 0.01."""
    if config.rollouts.engine != "vllm":
        return None
    for section in ("rollouts", "evaluation"):
        part = getattr(config, section, None)
        if part is not None and part.temperature < 0.01:
            key = f"{section}.temperature"
            return Problem(
                (key, "rollouts.engine"),
                f"{key} {part.temperature:g} is below 0.01, the least that vLLM samples at",
            )
    return None


ENGINE_RULES = (
    vllm_options_are_used,
    server_options_are_used,
    server_urls_are_addresses,
    engine_parts_fill_a_host,
    vllm_temperature_is_kept,
)
