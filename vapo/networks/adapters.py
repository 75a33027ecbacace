"""A critic without a backbone of its own: adapters and a value head on an actor's frozen base.

The adapters lie beside the base, not in it, so that they are sharded, trained and saved as the
critic's. A hook on each linear module of the base adds the output of the active adapter. Like a
probe this is a Hugging Face model of its own kind; importing this module registers it with
Transformers' Auto classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from vapo.config.networks import LoraConfig
from vapo.errors import UserError
from vapo.networks.lora import adapters_off, linear_modules, target_names

KEY = "critic.lora"


class AdapterModelConfig(PreTrainedConfig):
    """The config.json of a critic that consists of LoRA adapters of `rank` on an actor's modules.

    `targets` maps each module's name to its numbers of input and output channels.
    `actor_fingerprint` names the base on which saved adapters were trained; None: unknown.
    `hidden_size` and `num_hidden_layers` are the base's.
    """

    model_type = "vapo_adapters"

    def __init__(
        self,
        *,
        rank: int = 1,
        lora_alpha: float = 1.0,
        targets: Mapping[str, Sequence[int]] | None = None,
        actor_fingerprint: str | None = None,
        hidden_size: int = 1,
        num_hidden_layers: int = 0,
        **options: Any,
    ) -> None:
        self.rank, self.lora_alpha = rank, lora_alpha
        self.targets = {name: list(sizes) for name, sizes in (targets or {}).items()}
        self.actor_fingerprint = actor_fingerprint
        self.hidden_size, self.num_hidden_layers = hidden_size, num_hidden_layers
        super().__init__(**options)


class Adapter(nn.Module):
    """One low-rank adapter: computes lora_alpha / rank * B A x, which is added to the output of a
    frozen linear module."""

    def __init__(self, inputs: int, outputs: int, config: AdapterModelConfig) -> None:
        super().__init__()
        self.lora_A = nn.Linear(inputs, config.rank, bias=False)
        self.lora_B = nn.Linear(config.rank, outputs, bias=False)
        self.scale = config.lora_alpha / config.rank

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):  # autocast would cast both
            x = x.to(self.lora_A.weight.dtype)
        update: Tensor = self.lora_B(self.lora_A(x)) * self.scale
        return update


class AdapterLayers(nn.Module):
    """All adapters of a critic. They stand where other critics have a backbone.

    `by_module` maps the name of a module of the actor to its adapter. `layers` is empty, so FSDP
    shards the adapters as one unit.
    """

    def __init__(self, config: AdapterModelConfig) -> None:
        super().__init__()
        self.layers, self.adapters = nn.ModuleList(), nn.Module()
        self.by_module: dict[str, Adapter] = {}
        for name, (inputs, outputs) in config.targets.items():
            *parents, last = name.split(".")
            parent_module = self.adapters
            for parent in parents:
                if not hasattr(parent_module, parent):
                    parent_module.add_module(parent, nn.Module())
                parent_module = parent_module.get_submodule(parent)
            self.by_module[name] = Adapter(inputs, outputs, config)
            parent_module.add_module(last, self.by_module[name])

    def add(self, module: str, x: Tensor, output: Tensor) -> Tensor:
        """Return a module's output plus that of its adapter, in the dtype of the module's output.

        `module` is the module's name, and `x` its input. Without an adapter the output is returned.
        """
        adapter = self.by_module.get(module)
        return output if adapter is None else (output + adapter(x)).to(output.dtype)


class AdaptersForSequenceClassification(PreTrainedModel):
    """The trained part of a critic on an actor's frozen base: adapters, and a value head `score`.

    The head reads the states that the base computes with the adapters.
    """

    config_class = AdapterModelConfig
    base_model_prefix = "model"

    def __init__(self, config: AdapterModelConfig) -> None:
        super().__init__(config)
        self.model = AdapterLayers(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels or 1, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return an empty embedding: the base embeds the tokens."""
        return nn.Embedding(0, self.config.hidden_size)


AutoConfig.register(AdapterModelConfig.model_type, AdapterModelConfig)
AutoModelForSequenceClassification.register(AdapterModelConfig, AdaptersForSequenceClassification)


def adapters_network_config(
    model: PreTrainedConfig, path: str, options: LoraConfig
) -> AdapterModelConfig:
    """Return the config of a critic of adapters that starts from the folder `path`.

    If `model`, the config in that folder, describes saved adapters, it is returned. Otherwise the
    folder has a policy, and the result describes new adapters on it.

    Raises: UserError: the saved adapters do not have the rank or lora_alpha of the options.
    """
    if isinstance(model, AdapterModelConfig):
        for name in ("rank", "lora_alpha"):
            saved_value, config_value = getattr(model, name), getattr(options, name)
            if saved_value != config_value:
                raise UserError(
                    f"{path}: its adapters have {name} {saved_value:g}, and {KEY}.{name} is "
                    f"{config_value:g}: set {KEY}.{name}={saved_value:g}, or critic.init=policy"
                )
        return model
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(model, trust_remote_code=False)
    sizes = {name: [m.in_features, m.out_features] for name, m in linear_modules(base)}
    text: Any = model.get_text_config(decoder=True)
    return AdapterModelConfig(
        rank=options.rank,
        lora_alpha=options.lora_alpha,
        targets={name: sizes[name] for name in target_names(base, options, KEY)},
        hidden_size=text.hidden_size,
        num_hidden_layers=text.num_hidden_layers,
        num_labels=1,
        name_or_path=path,
    )


@torch.no_grad()
def new_adapters(config: AdapterModelConfig, seed: int) -> PreTrainedModel:
    """Make a critic of new adapters. B is 0, so they change no state; A is random by the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AdaptersForSequenceClassification(config).float()
        for adapter in model.model.by_module.values():
            nn.init.kaiming_uniform_(adapter.lora_A.weight, a=math.sqrt(5))
            adapter.lora_B.weight.zero_()
    return model


# ---- on the base ------------------------------------------------------------------------------

_active_adapters: ContextVar[tuple[AdapterLayers, Sequence[Any]] | None] = ContextVar(
    "adapters", default=None
)


def accept_adapters(model: PreTrainedModel) -> None:
    """Register a hook on each linear module of a policy, through which a critic's adapters act.

    The hooks do nothing outside of `on_base`. Call this before the policy gets its own adapters.
    """
    places = dict(linear_modules(model))
    for name, module in places.items():
        module.register_forward_hook(_adapter_hook(name))
    live: Any = model
    live.adapter_places = frozenset(places)


def _adapter_hook(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        active = _active_adapters.get()
        return output if active is None else active[0].add(name, args[0], output)

    return hook


@contextmanager
def on_base(adapters: AdapterLayers, peft_layers: Sequence[Any]) -> Iterator[None]:
    """Inside the block, let the actor compute with a critic's adapters instead of its own.

    Args:
        adapters: the critic's adapters.
        peft_layers: the actor's modules that have adapters of its own.
    """
    token = _active_adapters.set((adapters, peft_layers))
    try:
        with adapters_off(peft_layers):
            yield
    finally:
        _active_adapters.reset(token)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts in which gradient checkpointing runs a layer the first and second time.

    The second time is in the backward pass, when the block of `on_base` has ended. Its context
    turns on again the adapters that are active now, at the first time.
    """
    active = _active_adapters.get()
    return nullcontext(), nullcontext() if active is None else on_base(*active)
