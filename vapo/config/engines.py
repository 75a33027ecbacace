"""The options of the sampling engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import MISSING

from vapo.config.kinds import option, section


@dataclass
class EngineOptions:
    """Options of a sampling engine that the trainer reads, wherever the engine runs."""

    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "the engine's dtype; auto: bfloat16 if trainer.precision is (or auto becomes) bf16-mixed, "
        "else actor.dtype",
    )
    max_logprob_gap: float | None = option(
        None,
        "after each sync, the largest mean gap in nats between what engine and trainer say of "
        "fixed prompts; null: 0.001 in float32, 0.1 in bfloat16",
        gt=0,
    )
    timeout_s: float = option(
        600.0, "the engine counts as hung after so long without a token", gt=0
    )

    def dtype_name(self, precision: str, actor_dtype: str) -> str:
        """Return the engine's dtype.

        For `auto` it is bfloat16 if the trainer's precision is bf16-mixed, else the actor's dtype.
        """
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if precision == "bf16-mixed" else actor_dtype


@dataclass
class VllmOptions(EngineOptions):
    """Options with which a vLLM engine starts, in a trainer process or by `vapo serve`."""

    gpu_memory_utilization: float = option(
        0.5, "share of the device's memory for the engine's weights and KV cache", gt=0, le=1
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "the KV cache in bytes; null: what gpu_memory_utilization leaves, 1 GiB on a CPU",
        ge=1,
    )
    tensor_parallel_size: int = option(
        1,
        "this many devices share one engine, each with a part of every layer; in the trainer's "
        "processes this many neighbours; for a policy whose weights and KV cache are too large "
        "for one device",
        ge=1,
    )
    enforce_eager: bool | None = option(
        None, "no torch.compile and no CUDA graphs in the engine; null: true on a CPU"
    )
    engine_args: dict[str, Any] = option(
        {}, "further arguments of vLLM's EngineArgs, by their names there"
    )


@dataclass
class ColocatedVllm(VllmOptions):
    """Options of the vLLM engine that runs inside every trainer process."""

    sleep_level: Literal["auto", 0, 1, 2] = option(
        "auto",
        "while the networks train on a GPU: 0 keeps everything, 1 frees the KV cache and moves the "
        "weights to the host, 2 frees both (they are pushed again); auto: 0 where `vapo fit` "
        "estimates that engine and training fit the GPU together, else 1; a CPU engine keeps all",
    )

    @property
    def depth(self) -> int:
        """The sleep level as a number: 1 for `auto`, which `vapo fit` replaces where it can."""
        return 1 if self.sleep_level == "auto" else self.sleep_level


@dataclass
class ServerOptions(VllmOptions):
    """Options of the `vllm serve` processes that sample for a run, which `vapo serve` starts."""

    urls: str = option(MISSING, "addresses, as http://gpu2:8100, separated by commas")
    weights: Literal["folder", "nccl"] = option(
        "folder",
        "how new weights come to the servers: as files in a folder that trainer and servers see, "
        "or from GPU to GPU; `vapo serve` must have the same",
    )
    weights_folder: str | None = option(
        None, "that folder; null: output_dir, which is enough where all run on one host"
    )
    weights_host: str | None = option(
        None, "with nccl, the first trainer process's host as the servers call it; null: its name"
    )


@dataclass
class VllmEngine:
    vllm: ColocatedVllm = section(ColocatedVllm, "the vLLM engine in every trainer process")

    @property
    def engine_options(self) -> EngineOptions:
        return self.vllm


@dataclass
class VllmServerEngine:
    servers: ServerOptions = section(ServerOptions, "the `vllm serve` processes")

    @property
    def engine_options(self) -> EngineOptions:
        return self.servers
