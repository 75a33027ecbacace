"""Mixtures of experts: count the weights that compute a token, turn the router's loss off.

Routing is Transformers' own. An expert takes every token that the router gives it, so padding and
other rows do not change which experts compute a token.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad, silu
from transformers import PreTrainedConfig, PreTrainedModel

from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.system.process import is_main_process

# Names in a config of the number of experts that a token goes through.
_NUMS_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")


def num_active(model: PreTrainedModel, part: nn.Module | None = None) -> dict[int, int]:
    """Count for each parameter of a model, or of its `part`, how many of its numbers a token uses.

    A token goes through some of the experts, and through all other weights.

    Returns: the counts by the `id` of the parameter.
    Raises: UserError: the config lets a token go through more experts than a layer has.
    """
    active_counts = {id(p): p.numel() for p in (part or model).parameters()}
    for experts in _experts(part or model):
        num_chosen = _num_chosen(model, experts.num_experts)
        for parameter in experts.parameters(recurse=False):
            active_counts[id(parameter)] = parameter.numel() // experts.num_experts * num_chosen
    return active_counts


def _num_chosen(model: PreTrainedModel, num_experts: int) -> int:
    """Return how many of a layer's `num_experts` experts a token goes through, by the config.

    Raises: UserError: the config does not say so, or the number is not from 1 to `num_experts`.
    """
    config: Any = model.config.get_text_config(decoder=True)
    key = next((key for key in _NUMS_CHOSEN if hasattr(config, key)), _NUMS_CHOSEN[0])
    number = getattr(config, key, None)
    if not isinstance(number, int) or not 0 < number <= num_experts:
        raise UserError(
            f"{model.name_or_path}/config.json: {key} is {number}, and a layer has {num_experts} "
            f"experts: give how many of them a token goes through, from 1 to {num_experts}"
        )
    return number


def _experts(model: nn.Module) -> Iterator[Any]:
    """Yield each module that holds the weights of all experts of a layer.

    Transformers gives such a module the attribute `has_gate`. A router has `num_experts` as well,
    but every token goes through all of its rows.
    """
    for module in model.modules():
        if hasattr(module, "num_experts") and hasattr(module, "has_gate"):
            yield module


def spread_evenly(model: nn.Module) -> None:
    """Replace the forward pass of a fake model's experts, so that all get equally many tokens.

    The products then take as many bytes as with real tokens. Transformers' own grouped products
    read the router's choice, which fake tensors do not have, or they support only bfloat16.
    """
    for experts in _experts(model):
        experts.forward = partial(_forward_evenly, experts)


def _forward_evenly(
    experts: Any, states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Float[Tensor, "tokens H"]:
    num_chosen = top_k_index.shape[-1]
    rows = states.repeat_interleave(num_chosen, dim=0)
    biases = (None, None)
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    if experts.has_bias:
        first_bias = experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias
        expert_ids = top_k_index.flatten()
        biases = (first_bias[expert_ids], experts.down_proj_bias[expert_ids])
    rows = _grouped(experts, rows, first, biases[0])
    activation = getattr(experts, "act_fn", silu)
    if experts.has_gate:
        gate, up = rows.chunk(2, dim=-1)
        rows = activation(gate) * up
    else:
        rows = activation(rows)
    rows = _grouped(experts, rows, experts.down_proj, biases[1]) * top_k_weights.reshape(-1, 1)
    return rows.unflatten(0, (-1, num_chosen)).sum(dim=1).to(states.dtype)


def _grouped(experts: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    count, num_rows = experts.num_experts, len(rows)
    padded = pad(rows.to(weight.dtype), (0, 0, 0, -num_rows % count)).unflatten(0, (count, -1))
    with torch.autocast(rows.device.type, enabled=False):  # it knows no grouped products
        product = padded @ (weight if experts.is_transposed else weight.transpose(1, 2))
    result = product.flatten(0, 1)[:num_rows]
    return result if bias is None else result + bias


def turn_off_router_loss(config: PreTrainedConfig) -> None:
    """Set a config so that the model returns no router logits, because no loss here reads them."""
    text: Any = config.get_text_config(decoder=True)
    if hasattr(text, "output_router_logits"):
        text.output_router_logits = False


def say_experts(path: str, model: PreTrainedModel) -> None:
    """Print how many weights of a policy compute a token, and that its router's loss is off.

    Nothing is printed for a policy without experts.
    """
    if not any(_experts(model)) or not is_main_process():
        return
    num_weights = sum(p.numel() for p in model.parameters())
    num_active_weights = sum(num_active(model).values())
    text: Any = model.config.get_text_config(decoder=True)
    coefficient = getattr(text, "router_aux_loss_coef", None)
    coefficient_text = "" if coefficient is None else f" (router_aux_loss_coef {coefficient:g})"
    say(
        f"{path}: {num_active_weights / 1e6:,.1f} M of {num_weights / 1e6:,.1f} M parameters "
        f"compute a token; the router's auxiliary loss{coefficient_text} is off",
        file=sys.stderr,
    )
