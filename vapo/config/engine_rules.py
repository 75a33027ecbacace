"""Rules between the keys of the sampling engine and others."""

from __future__ import annotations

from typing import Any

from vapo.config.engines import VllmEngine, VllmServerEngine
from vapo.config.problem import Problem

_VLLM = "rollouts.vllm"


def server_urls_are_addresses(config: Any) -> Problem | None:
    rollouts, key = config.rollouts, "rollouts.servers.urls"
    if not isinstance(rollouts, VllmServerEngine):
        return None
    if "@" in rollouts.servers.urls:  # which is not quoted
        return Problem(
            (key,),
            f"{key} has a user or password in it: give addresses alone, as http://gpu2:8100",
        )
    for url in rollouts.servers.urls.split(","):
        scheme, _, rest = url.strip().partition("://")
        if scheme != "http" or not rest.partition(":")[2].isdigit():
            return Problem((key,), f"{key}: {url.strip()!r} is not like http://gpu2:8100")
    return None


def engine_parts_fill_a_host(config: Any) -> Problem | None:
    """The parts of an engine exchange activations in every layer: not over a network of hosts."""
    rollouts = config.rollouts
    if not isinstance(rollouts, VllmEngine):
        return None
    parts = rollouts.vllm.tensor_parallel_size
    if config.trainer.devices % parts == 0:
        return None
    key = f"{_VLLM}.tensor_parallel_size"
    return Problem(
        (key, "trainer.devices"),
        f"{key} {parts} does not divide trainer.devices {config.trainer.devices}: the processes "
        "of a host are shared out to engines without remainder",
    )


def vllm_temperature_is_kept(config: Any) -> Problem | None:
    """vLLM raises a lower temperature to 0.01, also on a server."""
    if not isinstance(config.rollouts, VllmEngine | VllmServerEngine):
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
    server_urls_are_addresses,
    engine_parts_fill_a_host,
    vllm_temperature_is_kept,
)
