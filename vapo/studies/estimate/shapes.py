"""Make empty networks, whose passes are counted, from their config.json and options."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from vapo.config.networks import LoraConfig
from vapo.networks.actor_critic import Actor, Critic
from vapo.networks.adapters import accept_adapters, adapters_network_config
from vapo.networks.critics_on_actors import critic_of
from vapo.networks.lora import add_adapters
from vapo.networks.meta_device import Kind, model_of_config
from vapo.networks.model_configs import cut_layers
from vapo.networks.value_head import head_from_config, write_head


@dataclass(frozen=True)
class NetworkShape:
    """Everything that the memory of a network's passes depends on.

    Attributes:
        kind: a causal language model or a value model.
        config: the network's model config.
        dtype: the dtype of the parameters while they compute.
        on_gpu: whether the fake tensors stand for tensors on a GPU.
        casts_adapters: whether adapters are cast to `dtype`, as FSDP2's mixed precision does.
        read_layers: the actor's layers whose states a critic reads.
        states_dtype: the dtype of these states.
        base: for a critic of adapters (`lora`), the model config of the actor under them; else
            None.
    """

    kind: Kind
    config: PreTrainedConfig
    dtype: str
    attn_implementation: str
    gradient_checkpointing: bool
    autocast: bool
    on_gpu: bool
    has_entropy_bonus: bool = False
    lora: LoraConfig | None = None
    casts_adapters: bool = False
    read_layers: tuple[int, ...] = ()
    states_dtype: str = "float32"
    base: PreTrainedConfig | None = None

    @property
    def backbone(self) -> PreTrainedConfig:
        """The config of the model that reads the tokens: the base under adapters, else its own."""
        return self.base or self.config


def with_first_layers(shape: NetworkShape, num_layers: int) -> NetworkShape:
    """Return the shape of a network with only the first `num_layers` decoder layers."""
    config = copy.deepcopy(shape.backbone)
    cut_layers(config, num_layers)
    return replace(shape, config=config) if shape.base is None else replace(shape, base=config)


def frozen_base(base: PreTrainedConfig, *, dtype: str, attn_implementation: str = "auto") -> Actor:
    """Make an empty, frozen actor from its model config, to which a critic's adapters can be
    added.
    """
    kernels = {"dtype": dtype, "attn_implementation": attn_implementation}
    model = model_of_config("causal_lm", base, path=str(base.name_or_path), **kernels)
    accept_adapters(model.requires_grad_(False))
    return Actor(model)


def make_network(shape: NetworkShape) -> tuple[Actor | Critic, PreTrainedModel]:
    """Make a network of this shape, whose weights are empty.

    Return it, and the model that reads its tokens: its own, or the base under its adapters.
    """
    is_flash = shape.attn_implementation == "flash_attention_2"
    attention = "sdpa" if is_flash else shape.attn_implementation
    path, base, model_config = str(shape.config.name_or_path), None, shape.config
    if shape.base is not None:
        assert shape.lora is not None
        base = frozen_base(shape.base, dtype=shape.dtype, attn_implementation=attention)
        model_config = adapters_network_config(shape.base, path, shape.lora)
        write_head(model_config, head_from_config(shape.config))
    dtype = shape.dtype if base is None or shape.casts_adapters else "float32"
    model = model_of_config(
        shape.kind, model_config, path=path, dtype=dtype, attn_implementation=attention
    )
    if shape.lora is not None and base is None:
        add_adapters(model, shape.lora, seed=0)
        if shape.casts_adapters:
            model.to(getattr(torch, shape.dtype))
    network = Actor(model) if shape.kind == "causal_lm" else critic_of(model, base)
    if shape.casts_adapters and isinstance(network, Critic):
        for layer in network.head_layers:
            layer.float()
    return network, model if base is None else base.model
