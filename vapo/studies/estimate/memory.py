"""Estimate the memory that a config needs on each GPU, stage by stage, without loading weights.

Parameters are counted on empty networks (`network_bytes`), and passes run on fake tensors
(`passes`). Every prompt and response is as long as the config allows.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

from transformers import PreTrainedConfig

from vapo.config import FitConfig
from vapo.config.continuation_rules import most_continuations
from vapo.config.engines import ColocatedVllm, VllmEngine, VllmServerEngine
from vapo.config.hyperparameters import reads_old_logprobs
from vapo.errors import UserError
from vapo.networks.value_head import plan_head, write_head
from vapo.rollouts.engines.selection import has_mixed_copy
from vapo.studies.estimate.network_bytes import BYTES, NetworkBytes
from vapo.studies.estimate.passes import FakeNetwork, shares_prompts
from vapo.studies.estimate.sizes import (
    local_minibatch,
    local_rollouts,
    longest_rows,
    num_processes,
    worst_microbatch,
)
from vapo.studies.estimate.waiting_states import gram_bytes, read_layers, states_bytes

_SPARE_COLUMNS = 64  # the sampler's cache grows by this many columns
_PREFILL_TOKENS = 16_384  # the most tokens of one prefill forward of the sampler

Bytes = dict[str, float]  # the name of a part, as "KV cache" -> its bytes


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a config needs.

    Attributes:
        stages: stage -> part -> bytes on each GPU.
        parameters: network -> the number of its parameters.
        num_processes: the number of GPUs.
        host: part -> bytes of each process in the host's memory.
        shares_prompts: whether the responses of a pass share one forward of their prompt.
        checkpoint: bytes of one checkpoint, summed over all processes.
        active: network -> the number of parameters that compute a token. They are fewer than
            `parameters` if layers have experts.
    """

    stages: dict[str, Bytes]
    parameters: dict[str, int]
    num_processes: int
    host: Bytes = field(default_factory=dict)
    shares_prompts: bool = False
    checkpoint: float = 0.0
    active: dict[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        """The most bytes on a GPU at any stage."""
        return max(sum(parts.values()) for parts in self.stages.values())


def estimate_memory(
    config: FitConfig, *, actor: PreTrainedConfig, critic: PreTrainedConfig | None
) -> MemoryEstimate:
    """Estimate the memory of a config.

    Args:
        actor, critic: the model configs (config.json) of both networks. `critic` is None without a
            critic.
    """
    networks = [NetworkBytes("actor", config.actor, actor, config)]
    if critic is not None:
        critic = copy.deepcopy(critic)
        head = plan_head(critic, str(critic.name_or_path), config.critic).head
        # columns of log-probs are small beside the states, and the fake inputs have none
        write_head(critic, replace(head, num_logprob_columns=None))
        base = (networks[0], actor) if config.critic.kind == "adapters" else None
        networks.append(NetworkBytes("critic", config.critic, critic, config, base))
    has_reference = config.algorithm.kl.coef > 0
    resting: Bytes = {f"{n.name} weights": n.weights for n in networks}
    if has_reference and config.actor.lora is None:  # else it is the actor's own frozen weights
        resting["reference weights"] = networks[0].weights
    resting["optimizer states"] = sum(2 * n.trained for n in networks)
    host: Bytes = {}
    if config.trainer.cpu_offload:
        host, resting = resting | {"gradients": sum(n.trained for n in networks)}, {}
    if _saves_in_background(config):
        host |= _checkpoint_copy(networks, config)
    if layers := read_layers(config):
        host["actor's states"] = states_bytes(
            len(layers), actor, config, item_bytes=networks[0].compute_bytes
        )
    if grams := gram_bytes(actor, config):
        host["Gram matrices of critic.ridge"] = grams
    if isinstance(config.rollouts, VllmEngine):
        options = config.rollouts.vllm
        sampling = _vllm(networks[0], options, config)
        if options.depth == 0:
            resting |= sampling
    elif isinstance(config.rollouts, VllmServerEngine):
        sampling = {}
    else:
        sampling = _sampling(networks[0], config)
        if config.training.max_staleness > 0 or has_mixed_copy(config):
            resting["engine's weights"] = _engine_weights(networks[0], config)
        if config.training.max_staleness > 0:
            resting |= {  # sampling ahead needs these during every stage
                part if part.startswith("KV cache") else f"{part}, sampling ahead": size
                for part, size in sampling.items()
            }
            sampling = {}
    stages = {
        "sampling": resting | sampling,
        "log-probs": resting | _log_probs(networks, config, has_reference),
    }
    for network in networks:
        stages[f"{network.name} update"] = resting | _update(network, networks, config)
    stages["optimizer step"] = resting | _optimizer_step(networks, config)
    parameters = {n.name: n.copies * n.parameters.total for n in networks}
    active = {n.name: n.copies * n.parameters.active for n in networks}
    shares = shares_prompts([n.passes for n in networks], config)
    num_shards = num_processes(config) if config.trainer.strategy == "fsdp" else 1
    checkpoint = num_shards * _checkpoint_bytes(networks) + grams
    count = num_processes(config)
    return MemoryEstimate(stages, parameters, count, host, shares, checkpoint, active)


def _saves_in_background(config: FitConfig) -> bool:
    """Whether checkpoints are saved in the background: as configured, and by default on a GPU."""
    setting = config.checkpoints.save_in_background
    return config.trainer.accelerator != "cpu" if setting is None else setting


def _checkpoint_bytes(networks: list[NetworkBytes]) -> float:
    """Return a process's bytes of a checkpoint: weights, and two moments of each trained weight."""
    return sum(n.weights + 2 * n.trained for n in networks)


def _checkpoint_copy(networks: list[NetworkBytes], config: FitConfig) -> Bytes:
    """Return the bytes of the checkpoint's copy in the host's memory.

    Each process copies its own shards, or the first one copies all if it writes a single file.
    """
    size = _checkpoint_bytes(networks)
    if config.trainer.sharded_checkpoints or num_processes(config) == 1:
        return {"copy of a checkpoint": size}
    return {"copy of a checkpoint, first process only": size * num_processes(config)}


# ---- stages -----------------------------------------------------------------------------------


def _sampling(actor: NetworkBytes, config: FitConfig) -> Bytes:
    """Return the built-in sampler's bytes by part, with the cache at its widest.

    The cache exists twice while rows are moved together. With an environment it holds the same
    number of further rows, for episodes that wait for the environment.
    """
    rollouts, evaluation = config.rollouts, config.evaluation
    num_prompts = evaluation.num_prompts or (
        getattr(config.data.heldout, "num_examples", None) or config.data.heldout_size
    )
    continued = most_continuations(config)
    ahead = local_rollouts(config) * (1 + config.training.max_staleness)
    num_wanted = max(ahead, num_prompts * evaluation.k // num_processes(config))
    if continued is not None:
        num_wanted = max(num_wanted, continued.num_responses // num_processes(config))
    rows = max(min(rollouts.max_concurrent_sequences, num_wanted), 1)
    prompt = config.data.max_prompt_tokens
    response = max(rollouts.max_response_tokens, evaluation.max_response_tokens or 0)
    prefills, width = [], prompt + response + _SPARE_COLUMNS
    for longest in {prompt, prompt if continued is None else prompt + response - 1}:
        prompts = max(min(rows, _PREFILL_TOKENS // longest), 1)
        prefills.append(actor.passes.run(FakeNetwork.prefill, rows=prompts, prompt_tokens=longest))
    decode = actor.passes.run(
        FakeNetwork.decode,
        rows=rows,
        width=width,
        top_k=max(rollouts.top_k, evaluation.top_k),
        top_p=min(rollouts.top_p, evaluation.top_p),
    )
    between_turns = 0.0
    if config.environment.is_used:
        between_turns = decode.kept_bytes * (prompt + response) / width
    return {
        "gathered weights": actor.gathered,
        "KV cache": decode.kept_bytes,
        "KV cache, second copy": decode.kept_bytes,
        "KV cache, between turns": between_turns,
        "logits, temporaries": max(*(p.peak for p in prefills), decode.peak),
    }


def _engine_weights(actor: NetworkBytes, config: FitConfig) -> float:
    """Return the bytes of the sampler's copy of the actor.

    In a copy of mixed precision the layers are bfloat16.
    """
    if not has_mixed_copy(config):
        return actor.weights
    count = actor.parameters
    return float(BYTES["float32"] * count.root + BYTES["bfloat16"] * (count.total - count.root))


def _vllm(actor: NetworkBytes, options: ColocatedVllm, config: FitConfig) -> Bytes:
    """Return the bytes by part of a vLLM engine in this process: its weights, and a KV cache.

    Raise UserError if the config does not fix the cache's size.
    """
    if options.kv_cache_memory_bytes is None:
        raise UserError(
            "rollouts.vllm.kv_cache_memory_bytes is null, so the KV cache takes what "
            "rollouts.vllm.gpu_memory_utilization leaves of the GPU: set it to estimate this config"
        )
    dtype = options.dtype_name(config.trainer.precision, config.actor.dtype)
    return {
        "vLLM weights": actor.parameters.total * BYTES[dtype] / options.tensor_parallel_size,
        "vLLM KV cache": float(options.kv_cache_memory_bytes),
    }


def _log_probs(networks: list[NetworkBytes], config: FitConfig, has_reference: bool) -> Bytes:
    """Return the bytes by part of the forwards without gradients, which run one after the other.

    With sharding, the parameters outside the decoder layers stay gathered.
    """
    shares = shares_prompts([n.passes for n in networks], config)
    lengths = worst_microbatch(config, local_rollouts(config), shares_prompts=shares)._asdict()
    has_copy = has_reference and config.actor.lora is None
    roots = sum(n.root_gathered for n in networks) + has_copy * networks[0].root_gathered
    has_pages = config.value_pages.every_n_iterations is not None
    reads_actor = has_pages or reads_old_logprobs(config) or bool(read_layers(config))
    evaluated = networks if has_reference or reads_actor else networks[1:]
    layers = max((n.layers_gathered for n in evaluated), default=0.0)
    peaks = [
        n.passes.run(FakeNetwork.evaluation, **lengths).peak + n.layers_gathered for n in evaluated
    ]
    forward = max([layers, *peaks])
    return {"gathered weights": roots + layers, "logits, temporaries": forward - layers}


def _update(network: NetworkBytes, networks: list[NetworkBytes], config: FitConfig) -> Bytes:
    """Return the bytes by part of a micro-batch's forward and backward, with earlier gradients."""
    shares = shares_prompts([n.passes for n in networks], config)
    rows = local_minibatch(config, network.name)
    worst = worst_microbatch(config, rows, shares_prompts=shares)
    memory = network.passes.run(FakeNetwork.update, **worst._asdict())
    # extrapolated to many layers, the forward's end may need more than the peak of few layers
    peak = max(memory.peak, memory.kept_bytes)
    all_rows = longest_rows(config, rows, shares_prompts=shares)
    several = all_rows.num_tokens > worst.num_tokens
    return {
        "gradients": _gradients(network, several, peak, config),
        "gathered weights": network.layers_gathered + network.root_gathered + network.base_gathered,
        "gradients in reduction": network.reduction_bytes(peak),
        "activations": memory.kept_bytes,
        "logits, temporaries": peak - memory.kept_bytes,
    }


def _gradients(
    network: NetworkBytes, several: bool, activations: float, config: FitConfig
) -> float:
    """Return the bytes of a minibatch's gradients.

    If the ranks reduce only the last micro-batch, gradients are unsharded until then. The gradients
    of a single micro-batch grow while its activations shrink. If there are several critics, each
    has its own micro-batches, and the gradients of the others stay in memory.

    Args:
        several: whether the minibatch has more than one micro-batch.
        activations: the bytes of one micro-batch's activations.
    """
    if several and network.is_sharded and not config.trainer.reduce_every_microbatch:
        return network.whole_gradients
    if config.trainer.cpu_offload:  # once reduced, gradients lie in the host's memory
        return 0.0
    member = network.trained / network.copies
    return network.trained - member + (member if several else max(member - activations, 0.0))


def _optimizer_step(networks: list[NetworkBytes], config: FitConfig) -> Bytes:
    """Return the bytes by part of the optimizer's step: gradients.

    AdamW changes all else in place.
    """
    if config.trainer.cpu_offload:
        return {}  # the optimizer steps on the host
    return {"gradients": max(n.trained for n in networks)}
