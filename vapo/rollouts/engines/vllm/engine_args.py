"""Makes vLLM's EngineArgs from the config, and checks their names and that vLLM is there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from vapo.config.engines import ColocatedVllm, ServerOptions, VllmOptions
from vapo.errors import UserError
from vapo.errors.suggestions import did_you_mean
from vapo.system.installation import install_command

INSTALL = (
    f"on a GPU machine `{install_command('vllm')}`, without a GPU `make vllm` (docs/rollouts.md)"
)
_CPU_KV_CACHE_BYTES = 1 << 30
_CPU_BATCHED_TOKENS = 4096
# What each argument that vapo sets itself comes from; {} is the section of the engine's keys.
_SOURCES = {
    "model": "actor.path",
    "tokenizer": "actor.path: prompts come as token ids",
    "skip_tokenizer_init": "vapo: prompts come as token ids",
    "dtype": "{}.dtype",
    "max_model_len": "data.max_prompt_tokens and rollouts.max_response_tokens",
    "max_num_seqs": "rollouts.max_concurrent_sequences",
    "gpu_memory_utilization": "{}.gpu_memory_utilization",
    "kv_cache_memory_bytes": "{}.kv_cache_memory_bytes",
    "enforce_eager": "{}.enforce_eager",
    "enable_sleep_mode": "rollouts.vllm.sleep_level",
    "logprobs_mode": "vapo: log-probs are those of the distribution sampled from",
    "load_format": "vapo: the trainer pushes the weights",
    "generation_config": "vapo: sampling settings are the config's",
    "seed": "vapo: every response has a seed of its own",
    "distributed_executor_backend": "the trainer's processes",
    "disable_log_stats": "vapo",
    "tensor_parallel_size": "{}.tensor_parallel_size",
    "weight_transfer_config": "rollouts.servers.weights",
    "trust_remote_code": "nothing: vapo runs no code out of model folders",
}


def check_installed() -> None:
    """Check that vLLM is installed, without importing it. Raises: UserError: it is not."""
    if find_spec("vllm") is None:
        raise UserError(f"rollouts.engine=vllm: vLLM is not installed; {INSTALL}")


@dataclass(frozen=True)
class EngineSize:
    """What a vLLM engine must hold: tokens of one request, and requests at a time."""

    max_model_len: int
    max_num_seqs: int


def engine_arguments(
    options: VllmOptions,
    size: EngineSize,
    *,
    model_path: str,
    dtype: str,
    on_gpu: bool,
    in_process_group: bool = False,
) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's EngineArgs.

    `options.engine_args`, the user's own, are among them.
    """
    kv_bytes = options.kv_cache_memory_bytes
    if kv_bytes is None and not on_gpu:
        kv_bytes = _CPU_KV_CACHE_BYTES
    eager = not on_gpu if options.enforce_eager is None else options.enforce_eager
    arguments: dict[str, Any] = {
        "model": model_path,
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": size.max_model_len,
        "max_num_seqs": size.max_num_seqs,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": kv_bytes,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enforce_eager": eager,
        "logprobs_mode": "processed_logprobs",
        "load_format": "dummy",  # random: weights are pushed later, none are loaded from disk
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "trust_remote_code": False,
        "seed": 0,
    }
    if not on_gpu:
        # A prompt cut into chunks makes vLLM 0.32 rewind its request's generator, which a CPU's
        # cannot: "CPU Generator does not use offset".
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(_CPU_BATCHED_TOKENS, size.max_model_len)
    if isinstance(options, ColocatedVllm):
        arguments["enable_sleep_mode"] = on_gpu and options.depth > 0
    if in_process_group:
        arguments["distributed_executor_backend"] = "external_launcher"
    return arguments | dict(options.engine_args)


def check_engine_args(options: VllmOptions, engine_args_type: type) -> None:
    """Check the names in `options.engine_args` against vLLM's class of engine arguments.

    Raises: UserError: vLLM does not have such an argument, or vapo sets it from another key.
    """
    section = "rollouts.servers" if isinstance(options, ServerOptions) else "rollouts.vllm"
    argument_names = [field.name for field in dataclasses.fields(engine_args_type)]
    for name in options.engine_args:
        key = f"{section}.engine_args.{name}"
        if name in _SOURCES:
            raise UserError(f"{key} is set by {_SOURCES[name].format(section)}; leave it out here")
        if name not in argument_names:
            hint = did_you_mean(name, argument_names, quote="")
            raise UserError(f"{key} is not an argument of vLLM's EngineArgs{hint}")
