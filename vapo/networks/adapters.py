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
    """The config of adapters of `rank` on modules of an actor.

    `targets` maps each module's name to its numbers of input and output channels.
    `actor_fingerprint` says on which base saved adapters were trained; None: unknown. `hidden_size`
    and `num_hidden_layers` are the base's.
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
    """Computes lora_alpha / rank * B A x, to be added to a frozen module's output."""

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
    """Stands in the place of a backbone. Its `layers` are empty, so it is sharded as a whole."""

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
        """Add the output of a module's adapter, if it has one, to the module's output."""
        adapter = self.by_module.get(module)
        return output if adapter is None else (output + adapter(x)).to(output.dtype)


class AdaptersForSequenceClassification(PreTrainedModel):
    """Adapters, and a head `score` on the states that the base computes with them."""

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
    """Return the config of a critic of adapters that starts from a folder.

    The folder has saved adapters, or a policy for which new ones are made.

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
    """Make new adapters: B is 0, and A is random by the seed."""
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
    """Let a policy take a critic's adapters. Call this before the policy gets its own adapters."""
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
    """Turn on these adapters in the block, and turn off the adapters of the `peft_layers`."""
    token = _active_adapters.set((adapters, peft_layers))
    try:
        with adapters_off(peft_layers):
            yield
    finally:
        _active_adapters.reset(token)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Make the contexts of a checkpointed layer's first and second forward.

    The second one, in the backward, gets the adapters that are active now, in the first.
    """
    active = _active_adapters.get()
    return nullcontext(), nullcontext() if active is None else on_base(*active)
