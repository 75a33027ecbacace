"""The networks whose passes are counted, made empty of their config.json and options."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from vapo.config.networks import LoraConfig
from vapo.networks.actor_critic import Actor, Critic
from vapo.networks.adapters import accept_adapters, of_the_adapters
from vapo.networks.critics_on_actors import critic_of
from vapo.networks.lora import add_adapters
from vapo.networks.meta_device import Kind, model_of_config
from vapo.networks.model_configs import cut_layers
from vapo.networks.value_head import head_in, write_head


@dataclass(frozen=True)
class NetworkShape:
    """A network to count: `dtype` is that of its parameters while it computes."""

    kind: Kind
    config: PreTrainedConfig
    dtype: str
    attn_implementation: str
    gradient_checkpointing: bool
    autocast: bool
    on_gpu: bool
    has_entropy_bonus: bool = False
    lora: LoraConfig | None = None
    casts_adapters: bool = False  # to `dtype`, as FSDP2's mixed precision does
    read_layers: tuple[int, ...] = ()  # of an actor, whose states a critic reads
    states_dtype: str = "float32"  # of these
    base: PreTrainedConfig | None = None  # of an actor, which a critic's adapters (`lora`) are on

    @property
    def backbone(self) -> PreTrainedConfig:
        """Of the network that reads the tokens."""
        return self.base or self.config


def with_first_layers(shape: NetworkShape, num_layers: int) -> NetworkShape:
    """With the first so many decoder layers."""
    config = copy.deepcopy(shape.backbone)
    cut_layers(config, num_layers)
    return replace(shape, config=config) if shape.base is None else replace(shape, base=config)


def frozen_base(base: PreTrainedConfig, *, dtype: str, attn_implementation: str = "auto") -> Actor:
    """An empty actor as a critic's adapters are on it."""
    kernels = {"dtype": dtype, "attn_implementation": attn_implementation}
    model = model_of_config("causal_lm", base, path=str(base.name_or_path), **kernels)
    accept_adapters(model.requires_grad_(False))
    return Actor(model)


def made(shape: NetworkShape) -> tuple[Actor | Critic, PreTrainedModel]:
    """The empty network, and the model in it, or under its adapters, that reads the tokens."""
    is_flash = shape.attn_implementation == "flash_attention_2"
    attention = "sdpa" if is_flash else shape.attn_implementation
    path, base, own = str(shape.config.name_or_path), None, shape.config
    if shape.base is not None:
        assert shape.lora is not None
        base = frozen_base(shape.base, dtype=shape.dtype, attn_implementation=attention)
        own = of_the_adapters(shape.base, path, shape.lora)
        write_head(own, head_in(shape.config))
    dtype = shape.dtype if base is None or shape.casts_adapters else "float32"
    model = model_of_config(shape.kind, own, path=path, dtype=dtype, attn_implementation=attention)
    if shape.lora is not None and base is None:
        add_adapters(model, shape.lora, seed=0)
        if shape.casts_adapters:
            model.to(getattr(torch, shape.dtype))
    network = Actor(model) if shape.kind == "causal_lm" else critic_of(model, base)
    if shape.casts_adapters and isinstance(network, Critic):
        for layer in network.head_layers:
            layer.float()
    return network, model if base is None else base.model
