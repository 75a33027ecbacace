"""LoRA: low-rank adapters trained beside frozen weights, and merging them into plain weights.

The layers are peft's. Nothing outside the live module sees them: engines, exports and
`vapo validate` get W + lora_alpha / rank * B A under the names that the model's folder has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vapo.config.networks import LoraConfig
from vapo.errors import UserError
from vapo.networks.value_head import HEAD_LAYERS
from vapo.system.distributed import full_state
from vapo.system.installation import install_command
from vapo.system.private_attributes import switch_adapters

_BASE, _A, _B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
_WEIGHT = f"{_BASE}weight"


def add_adapters(
    model: PreTrainedModel, options: LoraConfig, *, seed: int, key: str = "actor.lora"
) -> None:
    """Freeze every weight but a value head's, and add float32 adapters to the chosen modules.

    An adapter's product is 0 at first, and its A random by the seed. `key` is the config key that
    errors name.

    Raises: UserError: peft is not installed, or the options choose modules or a rank that the
        model does not have (`target_names`).
    """
    try:
        import peft
    except ImportError:
        raise UserError(
            f"{key} needs peft, which is not installed: {install_command('lora')}"
        ) from None
    targets = target_names(model, options, key)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(
            peft.LoraConfig(
                r=options.rank,
                lora_alpha=options.lora_alpha,
                lora_dropout=0.0,  # with dropout the first minibatch's ratio would not be 1
                target_modules=targets,
                bias="none",
            ),
            nn.ModuleDict({"model": model}),  # with the model's config peft would adapt experts
        )
    for name, module in model.named_children():
        if name in HEAD_LAYERS:
            module.requires_grad_(True)
    for parameter in _adapter_parameters(model):
        parameter.data = parameter.data.float()
    for layer in adapter_layers(model):
        # a float32 layer needs no cast by peft: its inputs are float32, or autocast casts them
        is_float32 = layer.get_base_layer().weight.dtype is torch.float32
        layer.cast_input_dtype_enabled = not is_float32


def linear_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear modules of the decoder layers that can have adapters, with their full names.

    The output layer is left out, because log-probs are computed from its weight alone. So is the
    value head, which is trained itself. So are modules whose weight a Mamba layer or its kernel
    reads without calling them: an adapter on them would have no effect.
    """
    left_out = {id(getattr(model, name, None)) for name in HEAD_LAYERS}
    left_out.add(id(model.get_output_embeddings()))
    for module in model.modules():
        if hasattr(module, "A_log") and hasattr(module, "D"):
            left_out |= {id(getattr(module, name, None)) for name in ("out_proj", "dt_proj")}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module) not in left_out:
            yield name, module


def target_names(model: PreTrainedModel, options: LoraConfig, key: str) -> list[str]:
    """Return the full names of the linear modules that `options.target_modules` chooses.

    `key` is the options' key in the config, which errors name.

    Raises: UserError: a module is not in the decoder layers, two modules share one weight, or the
        rank is above a dimension of every chosen module.
    """
    leaf_names = {name: name.rpartition(".")[2] for name, _ in linear_modules(model)}
    available = sorted(set(leaf_names.values()))
    requested = [name.strip() for name in options.target_modules.split(",")]
    if requested == ["all"]:
        requested = available
    unknown_names = [name for name in requested if name not in available]
    if unknown_names or not available:
        raise UserError(
            f"{key}.target_modules: {type(model).__name__} has no linear module "
            f"{', '.join(map(repr, unknown_names))} in its layers; it has "
            f"{', '.join(available) or 'none'}"
        )
    targets = [name for name, leaf in leaf_names.items() if leaf in requested]
    weights = {id(model.get_parameter(f"{name}.weight")) for name in targets}
    if len(weights) < len(targets):
        raise UserError(
            f"{key}.target_modules: layers of {type(model).__name__} share the weights of "
            f"{', '.join(requested)}, and an adapter is one module's: name others, or set "
            f"{key}=null"
        )
    largest = max(targets, key=lambda name: min(model.get_parameter(f"{name}.weight").shape))
    max_rank = min(model.get_parameter(f"{largest}.weight").shape)
    if (
        options.rank > max_rank
    ):  # only the largest counts: others may use a rank that a small one cannot
        raise UserError(
            f"{key}.rank is {options.rank}, above {max_rank}, a dimension of {largest}, and a "
            f"larger rank learns no more: set {key}.rank to at most {max_rank}, or name larger "
            f"modules in {key}.target_modules"
        )
    return targets


def adapter_layers(model: nn.Module) -> list[Any]:
    """List the modules to which peft has added adapters."""
    return [m for m in model.modules() if hasattr(m, "enable_adapters") and hasattr(m, "lora_A")]


def _adapter_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    return (p for name, p in model.named_parameters() if name.endswith((_A, _B)))


@contextmanager
def adapters_off(layers: Sequence[Any]) -> Iterator[None]:
    """Inside the block, turn off the adapters of these layers: the model computes without them."""
    were_off = [switch_adapters(layer, off=True) for layer in layers]
    try:
        yield
    finally:
        for layer, off in zip(layers, were_off, strict=True):
            switch_adapters(layer, off=off)


def merge_adapters(
    weights: Iterable[tuple[str, Tensor]], options: LoraConfig | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a state dict, with LoRA adapters merged into the weights they adapt.

    The names are those of the model without adapters. Without options the weights are unchanged.
    Only weights that still wait for their adapter are held in memory, because the weights may be
    shards that are gathered one by one.

    Raises: ValueError: an adapter or its weight is missing.
    """
    if options is None:
        yield from weights
        return
    pending: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        part = next((part for part in (_WEIGHT, _A, _B) if name.endswith(part)), None)
        if part is None:
            yield name.replace(_BASE, "."), tensor
            continue
        module = name.removesuffix(part)
        parts = pending.setdefault(module, {})
        parts[part] = tensor
        if len(parts) == 3:
            del pending[module]
            weight, update = parts[_WEIGHT], parts[_B].float() @ parts[_A].float()
            scaled_update = options.lora_alpha / options.rank * update
            yield f"{module}.weight", (weight.float() + scaled_update).to(weight.dtype)
    if pending:
        raise ValueError(f"weights or adapters are missing of {', '.join(sorted(pending))}")


def whole_weights(network: nn.Module, options: LoraConfig | None) -> Iterator[tuple[str, Tensor]]:
    """Yield by name the whole weights of a live, maybe sharded, network, with adapters merged.

    The names are those of the model's folder. Every rank must iterate. A tied weight comes under
    both of its names, for an engine that holds it as two.
    """
    weights = ((name.removeprefix("model."), tensor) for name, tensor in full_state(network))
    yield from merge_adapters(weights, options)


def plain_copy(model: PreTrainedModel, options: LoraConfig | None) -> PreTrainedModel:
    """Return a frozen copy of a model with its adapters merged, for a sampling engine."""
    state = dict(merge_adapters(model.state_dict().items(), options))
    copy = deepcopy(model)
    for name, module in list(copy.named_modules()):
        if options is not None and hasattr(module, "lora_A"):
            copy.set_submodule(name, module.get_submodule("base_layer"))
    copy.load_state_dict(state)
    return copy.requires_grad_(False)


def changing_names(model: PreTrainedModel) -> set[str]:
    """Return the names of the weights that training changes.

    For a model with adapters they are the weights to which the adapters are added, under the names
    that these have in the model without adapters.
    """
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapted = {f"{name.removesuffix(_B)}.weight" for name in names if name.endswith(_B)}
    return adapted or names


@contextmanager
def with_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the block give an unsharded network these weights; afterwards restore its own exactly.

    The names are those of the model without adapters. A module with an adapter gets the weight as
    its base weight, and all adapters add nothing. So any weights can be set.
    """
    live = dict(model.named_parameters())
    replaced_weights = {n: live[n] if n in live else live[_base_name(n)] for n in weights}
    adapters = {name: tensor for name, tensor in live.items() if name.endswith(_B)}
    previous = {
        name: tensor.detach().clone() for name, tensor in {**replaced_weights, **adapters}.items()
    }
    with torch.no_grad():
        try:
            for tensor in adapters.values():
                tensor.zero_()
            for name, tensor in replaced_weights.items():
                tensor.copy_(weights[name])
            yield
        finally:
            for name, tensor in {**replaced_weights, **adapters}.items():
                tensor.copy_(previous[name])


def _base_name(name: str) -> str:
    """Return the name under which a module with an adapter has its base weight."""
    return f"{name.removesuffix('.weight')}{_WEIGHT}"
