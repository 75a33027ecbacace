"""The memory that a config needs on each GPU, stage by stage, before anything is loaded.

Parameters are counted on the networks themselves and passes are run on fake tensors
(`passes`); what sharding divides and gathers is worked out here. Lengths are the worst
that the config allows: every prompt and response as long as it may be.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Literal

from transformers import PreTrainedConfig

from vapo.config import FitConfig
from vapo.config.continuation_rules import most_continuations
from vapo.config.engines import ColocatedVllm, VllmEngine, VllmServerEngine
from vapo.config.hyperparameters import reads_old_logprobs
from vapo.config.schema import ActorConfig, CriticConfig
from vapo.errors import UserError
from vapo.networks.build import choose_trained
from vapo.networks.lora import add_adapters
from vapo.networks.meta_device import Kind, model_of_config
from vapo.networks.precision import computing_dtype
from vapo.networks.value_head import plan_head, write_head
from vapo.rollouts.engines.selection import has_mixed_copy
from vapo.studies.memory.passes import FakeNetwork, NetworkPasses, shares_prompts
from vapo.studies.memory.shapes import NetworkShape
from vapo.studies.memory.sizes import (
    local_minibatch,
    local_rollouts,
    longest_rows,
    num_processes,
    worst_microbatch,
)
from vapo.studies.memory.states import read_layers, states_bytes

GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2}
_SPARE_COLUMNS = 64  # room that the sampler's cache grows by
_PREFILL_TOKENS = 16_384  # of one prefill forward of the sampler

Bytes = dict[str, float]


@dataclass(frozen=True)
class Estimate:
    """Bytes by stage and part; `parameters` by network; `host` what a process keeps there.

    `checkpoint`: bytes of one, of all processes. `shares_prompts`: a prompt goes through the
    networks once for its responses in one pass.
    """

    stages: dict[str, Bytes]
    parameters: dict[str, int]
    num_processes: int
    host: Bytes = field(default_factory=dict)
    shares_prompts: bool = False
    checkpoint: float = 0.0

    @property
    def peak(self) -> float:
        return max(sum(parts.values()) for parts in self.stages.values())


class _Network:
    """One network's bytes on each GPU, whatever the stage; `passes` add what a pass needs.

    `base`: the actor, whose frozen weights compute for a critic of adapters, and its config.
    Units: bytes. `trained` is the part of the weights that has gradients and moments. Weights have
    the dtype of `options`, what is computed and gathered that of the precision, gradients on their
    way between GPUs float32 where the precision is mixed.
    """

    def __init__(
        self,
        name: Literal["actor", "critic"],
        options: ActorConfig | CriticConfig,
        model: PreTrainedConfig,
        config: FitConfig,
        base: tuple[_Network, PreTrainedConfig] | None = None,
    ) -> None:
        self.name: str = name
        self.is_sharded = config.trainer.strategy == "fsdp"
        is_mixed = config.trainer.precision == "bf16-mixed"
        computes = options if base is None else config.actor
        dtype = computing_dtype(config, computes.dtype)
        self.passes = NetworkPasses(
            NetworkShape(
                kind="causal_lm" if name == "actor" else "value_model",
                config=model,
                dtype=dtype,
                attn_implementation=computes.attn_implementation,
                gradient_checkpointing=options.gradient_checkpointing,
                autocast=is_mixed and not self.is_sharded,
                on_gpu=config.trainer.accelerator != "cpu",
                has_entropy_bonus=config.algorithm.entropy_coef > 0,
                lora=options.lora,
                casts_adapters=is_mixed and self.is_sharded,
                read_layers=read_layers(config) if name == "actor" else (),
                states_dtype=computing_dtype(config, config.actor.dtype),
                base=None if base is None else base[1],
            )
        )
        count, ranks = self.passes.parameters, num_processes(config)
        parameter_bytes, self.compute_bytes = _BYTES[options.dtype], _BYTES[dtype]
        if base is not None and not is_mixed:
            self.compute_bytes = parameter_bytes
        self.reduce_bytes = 4 if is_mixed else parameter_bytes
        self.parameters = count
        trained, adapters = count.total, 0
        is_part = options.lora is not None or bool(getattr(options, "frozen", ()))
        if is_part and base is None:
            trained, adapters = _trained_parameters(self.name, model, config)
        # several critics: a pass is of one at a time
        self.copies = options.count if isinstance(options, CriticConfig) else 1
        self.weights = self.copies * (count.total * parameter_bytes + adapters * 4) / ranks
        self.trained = self.copies * (trained * parameter_bytes + adapters * 4) / ranks
        self.whole_gradients = trained * self.reduce_bytes + adapters * 4
        self.trained_share = trained / count.total
        self.gathered = count.total * self.compute_bytes * self.is_sharded
        # embedding, head and last norm stay whole between a forward and its backward
        self.root_gathered = count.root * self.compute_bytes * self.is_sharded
        # the layer that computes, and the prefetched next one; offloaded, its shard too
        shard = count.layer * parameter_bytes / ranks * config.trainer.cpu_offload
        layers = 2 * count.layer * self.compute_bytes + shard
        self.layers_gathered = layers * self.is_sharded
        self.base_gathered = 0.0  # the root of the network that adapters are on
        if base is not None:
            self.layers_gathered = base[0].layers_gathered
            self.base_gathered = base[0].root_gathered

    def reducing(self, activations: float) -> float:
        """Whole gradients on their way to their shards, beyond the activations of the time.

        A layer's go while the activations of those below are kept, and the head's wait for the
        embedding's; the root's go last.
        """
        if not self.is_sharded:
            return 0.0
        p = self.parameters
        early = (p.head + p.layer) * self.compute_bytes + p.layer * self.reduce_bytes
        late = p.root * (self.compute_bytes + self.reduce_bytes) - activations
        return self.trained_share * max(early, late)


def estimate_memory(
    config: FitConfig, *, actor: PreTrainedConfig, critic: PreTrainedConfig | None
) -> Estimate:
    """Estimate the memory of a config; the model configs are those that its paths name."""
    networks = [_Network("actor", config.actor, actor, config)]
    if critic is not None:
        critic = copy.deepcopy(critic)
        head = plan_head(critic, str(critic.name_or_path), config.critic).head
        # the columns of log-probs are nothing beside the states, and made-up inputs have none
        write_head(critic, replace(head, num_logprob_columns=None))
        base = (networks[0], actor) if config.critic.kind == "adapters" else None
        networks.append(_Network("critic", config.critic, critic, config, base))
    has_reference = config.algorithm.kl.coef > 0
    resting: Bytes = {f"{n.name} weights": n.weights for n in networks}
    if has_reference and config.actor.lora is None:  # else it is the actor's own frozen weights
        resting["reference weights"] = networks[0].weights
    resting["optimizer states"] = sum(2 * n.trained for n in networks)
    host: Bytes = {}
    if config.trainer.cpu_offload:
        host, resting = resting | {"gradients": sum(n.trained for n in networks)}, {}
    if config.checkpoints.save_in_background:
        host |= _checkpoint_copy(networks, config)
    if layers := read_layers(config):
        host["actor's states"] = states_bytes(
            len(layers), actor, config, item_bytes=networks[0].compute_bytes
        )
    if isinstance(config.rollouts, VllmEngine):
        options = config.rollouts.vllm
        sampling = _vllm(networks[0], options, config)
        if options.sleep_level == 0:
            resting |= sampling
    elif isinstance(config.rollouts, VllmServerEngine):
        sampling = {}
    else:
        sampling = _sampling(networks[0], config)
        if config.training.max_staleness > 0 or has_mixed_copy(config):
            resting["engine's weights"] = _own_weights(networks[0], config)
        if config.training.max_staleness > 0:
            resting |= {  # a thread that samples ahead needs these at any time
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
    shares = shares_prompts([n.passes for n in networks], config)
    num_shards = num_processes(config) if config.trainer.strategy == "fsdp" else 1
    checkpoint = num_shards * _written(networks)
    return Estimate(stages, parameters, num_processes(config), host, shares, checkpoint)


def _trained_parameters(name: str, model: PreTrainedConfig, config: FitConfig) -> tuple[int, int]:
    """A network's own weights that are trained, and its adapters', which are float32."""
    options = config.actor if name == "actor" else config.critic
    kernels = {"dtype": options.dtype, "attn_implementation": options.attn_implementation}
    kind: Kind = "causal_lm" if name == "actor" else "value_model"
    empty = model_of_config(kind, model, path=str(model.name_or_path), **kernels)
    own = {id(p) for p in empty.parameters()}
    if isinstance(options, CriticConfig):
        choose_trained(empty, config)
    elif options.lora is not None:
        add_adapters(empty, options.lora, seed=0)
    trained = [p for p in empty.parameters() if p.requires_grad]
    adapters = sum(p.numel() for p in trained if id(p) not in own)
    return sum(p.numel() for p in trained) - adapters, adapters


def _written(networks: list[_Network]) -> float:
    """A process's part of a checkpoint: weights, and two moments of what is trained."""
    return sum(n.weights + 2 * n.trained for n in networks)


def _checkpoint_copy(networks: list[_Network], config: FitConfig) -> Bytes:
    """What is written of the shards, or, where one process writes one file, of all."""
    written = _written(networks)
    if config.trainer.sharded_checkpoints or num_processes(config) == 1:
        return {"copy of a checkpoint": written}
    return {"copy of a checkpoint, first process only": written * num_processes(config)}


# ---- stages -----------------------------------------------------------------------------------


def _sampling(actor: _Network, config: FitConfig) -> Bytes:
    """The cache at its widest, twice while rows are moved together; one decoding step.

    With an environment as many further rows, of episodes that wait for it, are kept.
    """
    rollouts, evaluation = config.rollouts, config.evaluation
    num_prompts = evaluation.num_prompts or (
        getattr(config.data.heldout, "num_examples", None) or config.data.heldout_size
    )
    continued = most_continuations(config)
    ahead = local_rollouts(config) * (1 + config.training.max_staleness)
    wanted = max(ahead, num_prompts * evaluation.k // num_processes(config))
    if continued is not None:
        wanted = max(wanted, continued.num_responses // num_processes(config))
    rows = max(min(rollouts.max_concurrent_sequences, wanted), 1)
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
    kept = decode.kept * (prompt + response) / width if config.environment.is_used else 0.0
    return {
        "gathered weights": actor.gathered,
        "KV cache": decode.kept,
        "KV cache, second copy": decode.kept,
        "KV cache, between turns": kept,
        "logits, temporaries": max(*(p.peak for p in prefills), decode.peak),
    }


def _own_weights(actor: _Network, config: FitConfig) -> float:
    """The engine's copy of the actor; for mixed precision the layers' weights are bfloat16."""
    if not has_mixed_copy(config):
        return actor.weights
    count = actor.parameters
    return float(_BYTES["float32"] * count.root + _BYTES["bfloat16"] * (count.total - count.root))


def _vllm(actor: _Network, options: ColocatedVllm, config: FitConfig) -> Bytes:
    """An engine of this process while awake: the actor's weights once more and its KV cache."""
    if options.kv_cache_memory_bytes is None:
        raise UserError(
            "rollouts.vllm.kv_cache_memory_bytes is null, so the KV cache takes what "
            "rollouts.vllm.gpu_memory_utilization leaves of the GPU: set it to estimate this config"
        )
    dtype = options.dtype_name(config.trainer.precision, config.actor.dtype)
    return {
        "vLLM weights": actor.parameters.total * _BYTES[dtype] / options.tensor_parallel_size,
        "vLLM KV cache": float(options.kv_cache_memory_bytes),
    }


def _log_probs(networks: list[_Network], config: FitConfig, has_reference: bool) -> Bytes:
    """Forwards without gradients, one network after the other; gathered roots stay."""
    shares = shares_prompts([n.passes for n in networks], config)
    lengths = worst_microbatch(config, local_rollouts(config), shares_prompts=shares)._asdict()
    has_copy = has_reference and config.actor.lora is None
    roots = sum(n.root_gathered for n in networks) + has_copy * networks[0].root_gathered
    has_pages = config.value_pages.every_n_iterations is not None
    reads_actor = has_pages or reads_old_logprobs(config) or bool(read_layers(config))
    own = networks if has_reference or reads_actor else networks[1:]
    peaks = [n.passes.run(FakeNetwork.evaluation, **lengths).peak + n.layers_gathered for n in own]
    layers = max((n.layers_gathered for n in own), default=0.0)
    forward = max([layers, *peaks])
    return {"gathered weights": roots + layers, "logits, temporaries": forward - layers}


def _update(network: _Network, networks: list[_Network], config: FitConfig) -> Bytes:
    """Forward and backward of a micro-batch, plus the gradients of earlier micro-batches."""
    shares = shares_prompts([n.passes for n in networks], config)
    rows = local_minibatch(config, network.name)
    worst = worst_microbatch(config, rows, shares_prompts=shares)
    memory = network.passes.run(FakeNetwork.update, **worst._asdict())
    # few layers may peak at a gradient, where those of many keep more at the forward's end
    peak = max(memory.peak, memory.kept)
    all_rows = longest_rows(config, rows, shares_prompts=shares)
    several = all_rows.num_tokens > worst.num_tokens
    return {
        "gradients": _gradients(network, several, peak, config),
        "gathered weights": network.layers_gathered + network.root_gathered + network.base_gathered,
        "gradients in reduction": network.reducing(peak),
        "activations": memory.kept,
        "logits, temporaries": peak - memory.kept,
    }


def _gradients(network: _Network, several: bool, activations: float, config: FitConfig) -> float:
    """Of a minibatch of one or `several` micro-batches: whole ones until the last is reduced.

    Those of the only micro-batch grow while its activations go. Of several critics each has
    micro-batches of its own, and the others' gradients stay.
    """
    if several and network.is_sharded and not config.trainer.reduce_every_microbatch:
        return network.whole_gradients
    if config.trainer.cpu_offload:  # reduced, they lie in the host's memory
        return 0.0
    own = network.trained / network.copies
    return network.trained - own + (own if several else max(own - activations, 0.0))


def _optimizer_step(networks: list[_Network], config: FitConfig) -> Bytes:
    """AdamW on a GPU steps all parameters of a network at once, with a copy of one state."""
    if config.trainer.cpu_offload:
        return {}  # it steps on the host, one parameter after the other
    on_cpu = config.trainer.accelerator == "cpu"
    gradients = max(n.trained for n in networks)
    return {"gradients": gradients, "logits, temporaries": 0.0 if on_cpu else gradients}
