"""Count one network's bytes: its weights, the trained ones, and what sharding divides and
gathers.
"""

from __future__ import annotations

from typing import Literal

from transformers import PreTrainedConfig

from vapo.config import FitConfig
from vapo.config.schema import ActorConfig, CriticConfig
from vapo.networks.build import choose_trained
from vapo.networks.lora import add_adapters
from vapo.networks.meta_device import Kind, model_of_config
from vapo.networks.precision import computing_dtype
from vapo.studies.estimate.passes import NetworkPasses
from vapo.studies.estimate.shapes import NetworkShape
from vapo.studies.estimate.sizes import num_processes
from vapo.studies.estimate.waiting_states import read_layers

BYTES = {"float32": 4, "bfloat16": 2}


class NetworkBytes:
    """One network's bytes on each GPU, whatever the stage; `passes` measures single passes.

    Weights have the dtype of `options`. Computed and gathered tensors have the dtype of
    `computing_dtype`, or that of `options` for adapters without mixed precision. While gradients
    are reduced, they are float32 if the precision is mixed.

    Args:
        options: the network's section of the config.
        model: the network's model config (config.json).
        base: for a critic of adapters, the bytes of the actor whose weights it shares, and the
            actor's model config.

    Attributes:
        weights: bytes of the weights, sharded over the ranks.
        trained: bytes of the weights that have gradients and moments, sharded over the ranks.
        gathered: bytes of all gathered weights; 0 without sharding.
        root_gathered: bytes of the gathered weights outside the decoder layers.
        layers_gathered: bytes of the decoder layers that are gathered at once.
        parameters: numbers of parameters.
    """

    def __init__(
        self,
        name: Literal["actor", "critic"],
        options: ActorConfig | CriticConfig,
        model: PreTrainedConfig,
        config: FitConfig,
        base: tuple[NetworkBytes, PreTrainedConfig] | None = None,
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
                gradient_checkpointing=bool(options.gradient_checkpointing),  # auto begins with it
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
        parameter_bytes, self.compute_bytes = BYTES[options.dtype], BYTES[dtype]
        if base is not None and not is_mixed:
            self.compute_bytes = parameter_bytes
        self.reduce_bytes = 4 if is_mixed else parameter_bytes
        self.parameters = count
        trained, adapters = count.total, 0
        is_part = options.lora is not None or bool(getattr(options, "frozen", ()))
        is_part |= getattr(options, "ridge", None) is not None
        if is_part and base is None:
            trained, adapters = _trained_parameters(self.name, model, config)
        # a pass runs one of several critics at a time
        self.copies = options.count if isinstance(options, CriticConfig) else 1
        self.weights = self.copies * (count.total * parameter_bytes + adapters * 4) / ranks
        self.trained = self.copies * (trained * parameter_bytes + adapters * 4) / ranks
        self.whole_gradients = trained * self.reduce_bytes + adapters * 4
        self.trained_share = trained / count.total
        self.gathered = count.total * self.compute_bytes * self.is_sharded
        # embedding, head and last norm stay whole between a forward and its backward
        self.root_gathered = count.root * self.compute_bytes * self.is_sharded
        # the layer that computes, the prefetched next one, and with offloading a layer's shard
        shard = count.layer * parameter_bytes / ranks * config.trainer.cpu_offload
        layers = 2 * count.layer * self.compute_bytes + shard
        self.layers_gathered = layers * self.is_sharded
        self.base_gathered = 0.0  # the root of the network that adapters are on
        if base is not None:
            self.layers_gathered = base[0].layers_gathered
            self.base_gathered = base[0].root_gathered

    def reduction_bytes(self, activations: float) -> float:
        """Return the extra bytes for gradients that FSDP has not reduce-scattered yet.

        They are 0 without sharding, else the larger need of two moments of the backward pass.
        Early, a layer's gradients are reduced while the head's wait for the embedding's. At the end
        the gradients of the root (embedding, head, last norm) are reduced, in memory that the
        activations gave back.

        Args:
            activations: the bytes of the activations, which are free at the end.
        """
        if not self.is_sharded:
            return 0.0
        p = self.parameters
        early = (p.head + p.layer) * self.compute_bytes + p.layer * self.reduce_bytes
        late = p.root * (self.compute_bytes + self.reduce_bytes) - activations
        return self.trained_share * max(early, late)


def _trained_parameters(name: str, model: PreTrainedConfig, config: FitConfig) -> tuple[int, int]:
    """Return the numbers of trained parameters: of the network itself, and of its float32
    adapters.
    """
    options = config.actor if name == "actor" else config.critic
    kernels = {"dtype": options.dtype, "attn_implementation": options.attn_implementation}
    kind: Kind = "causal_lm" if name == "actor" else "value_model"
    empty = model_of_config(kind, model, path=str(model.name_or_path), **kernels)
    network_ids = {id(p) for p in empty.parameters()}
    if isinstance(options, CriticConfig):
        choose_trained(empty, config)
    elif options.lora is not None:
        add_adapters(empty, options.lora, seed=0)
    trained = [p for p in empty.parameters() if p.requires_grad]
    adapters = sum(p.numel() for p in trained if id(p) not in network_ids)
    return sum(p.numel() for p in trained) - adapters, adapters
