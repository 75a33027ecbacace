"""Mixtures of experts: how many weights compute a token, and that the router's loss is off.

Routing is Transformers' own. An expert takes every token that the router gives it, so that padding
and other rows change nothing of a token's experts.
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

from vapo.system.process import is_main_process
from vapo.system.shown_text import say


def num_active(model: PreTrainedModel, part: nn.Module | None = None) -> dict[int, int]:
    """For each parameter of a model, or of a part of it, how many of its numbers compute a token.

    All do, but those of experts, of which a token goes through `num_experts_per_tok`. A key is the
    parameter's `id`.
    """
    config: Any = model.config.get_text_config(decoder=True)
    active = {id(p): p.numel() for p in (part or model).parameters()}
    for experts in _experts(part or model):
        for parameter in experts.parameters(recurse=False):
            active[id(parameter)] = (
                parameter.numel() // experts.num_experts * config.num_experts_per_tok
            )
    return active


def _experts(model: nn.Module) -> Iterator[Any]:
    """The modules whose parameters are those of all experts of a layer, one after another.

    Transformers marks them where it puts its kernels for them in place (`has_gate`); a router has
    a row for each expert, too, but every token goes through all of them.
    """
    for module in model.modules():
        if hasattr(module, "num_experts") and hasattr(module, "has_gate"):
            yield module


def spread_evenly(model: nn.Module) -> None:
    """Let fake tokens be spread evenly over a model's experts, in as many bytes as real ones take.

    Transformers' grouped products find out by the values which tokens an expert has, or know
    bfloat16 alone where there are no values.
    """
    for experts in _experts(model):
        experts.forward = partial(_counted, experts)


def _counted(
    experts: Any, states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Float[Tensor, "tokens H"]:
    num_chosen = top_k_index.shape[-1]
    rows = states.repeat_interleave(num_chosen, dim=0)
    biases = (None, None)
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    if experts.has_bias:
        first_bias = experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias
        chosen = top_k_index.flatten()
        biases = (first_bias[chosen], experts.down_proj_bias[chosen])
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
    made = product.flatten(0, 1)[:num_rows]
    return made if bias is None else made + bias


def turn_off_router_loss(config: PreTrainedConfig) -> None:
    """Let the model return no router logits: nothing here adds the loss that balances experts."""
    text: Any = config.get_text_config(decoder=True)
    if hasattr(text, "output_router_logits"):
        text.output_router_logits = False


def say_experts(path: str, model: PreTrainedModel) -> None:
    """Say of a policy with experts how many weights compute a token, and that the router's loss is
    off."""
    if not any(_experts(model)) or not is_main_process():
        return
    total, active = sum(p.numel() for p in model.parameters()), sum(num_active(model).values())
    text: Any = model.config.get_text_config(decoder=True)
    coefficient = getattr(text, "router_aux_loss_coef", None)
    ours = "" if coefficient is None else f" (router_aux_loss_coef {coefficient:g})"
    say(
        f"{path}: {active / 1e6:,.1f} M of {total / 1e6:,.1f} M parameters compute a token; the "
        f"router's auxiliary loss{ours} is off",
        file=sys.stderr,
    )
