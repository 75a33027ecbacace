"""Layers with a state that each token changes: convolutions, gated delta nets, Mamba layers.

Padding on the left would change the state, so rows are padded on the right. The cache has a row's
state after its last token, and none after earlier tokens. So responses to one prompt get copies of
the prompt's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from vapo.errors import UserError
from vapo.system.private_attributes import causal_lm_class

_ATTENTION_KINDS = ("full_attention", "sliding_attention")
_KINDS = (*_ATTENTION_KINDS, "linear_attention", "conv", "hybrid")
"""The entries of `layer_types` whose layers the sampler supports."""
_CURE = "take a mixture of attention and recurrent layers, as Qwen3.5 or LFM2"


def cache_layers(config: PreTrainedConfig) -> list[Any]:
    """Return the layers of the empty cache that Transformers makes for a model."""
    layers: list[Any] = DynamicCache(config=config).layers
    return layers


def is_recurrent(layer: object) -> bool:
    """Whether a layer of the cache has a recurrent state, with or without keys and values."""
    return type(layer) in (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)


def has_recurrent_layers(config: PreTrainedConfig) -> bool:
    """Whether any layer of a model has a recurrent state."""
    return any(map(is_recurrent, cache_layers(config)))


def has_keys(layer: object) -> bool:
    """Whether a layer of the cache keeps keys and values of earlier tokens."""
    return isinstance(layer, DynamicLayer)


def recurrent_states(layer: Any) -> list[Tensor]:
    """Return the recurrent states of a layer of the cache; empty for a layer of attention alone."""
    if not isinstance(layer, LinearAttentionLayer):
        return []
    states = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [state for state in states if state is not None]


def num_attention_layers(config: PreTrainedConfig) -> int:
    """Count the layers of a model that attend to earlier tokens, by its config."""
    return sum(map(has_keys, cache_layers(config)))


def check_recurrent(path: str, config: PreTrainedConfig, layers: Sequence[object]) -> None:
    """Check that a model keeps all its state in Transformers' cache, and has a layer of attention.

    Args:
        layers: `cache_layers` of the config, each of a kind that the sampler supports.

    Raises: UserError: the model has a state elsewhere, or no layer with attention.
    """
    name, is_stateful = causal_lm_class(config)
    if is_stateful and not any(is_recurrent(layer) for layer in layers):
        raise UserError(
            f"{path}: {name} keeps a state outside of Transformers' cache, which the sampler does "
            f"not see: {_CURE}"
        )
    if not any(map(has_keys, layers)):
        raise UserError(f"{path}: {name} has no layer with attention: {_CURE}")


def check_layer_kinds(path: str, config: PreTrainedConfig) -> None:
    """Check that an architecture has the kinds of layers that `layer_types` of its config names.

    Transformers checks only that some architecture has them. Without this check it would make a
    model whose first forward pass raises KeyError.

    Raises: UserError: a kind is missing. The error names the key of config.json and the kinds that
        the architecture has.
    """
    kinds = set(getattr(config, "layer_types", None) or ()).difference(_ATTENTION_KINDS)
    name, is_stateful = causal_lm_class(config)
    if is_stateful or not name:
        return
    if unsupported_kinds := sorted(kind for kind in kinds if not _has_kind(config, kind)):
        supported_kinds = [
            kind for kind in _KINDS if kind not in unsupported_kinds and _has_kind(config, kind)
        ]
        raise UserError(
            f"{path}/config.json: layer_types has {', '.join(unsupported_kinds)}, and {name} has "
            f"only layers of {' and '.join(supported_kinds)}: correct the file, or copy it again "
            "from where the model comes from"
        )


def _has_kind(config: PreTrainedConfig, kind: str) -> bool:
    """Whether an architecture can compute a layer of this kind.

    A model of one such layer, without weights, is made and run on the meta device to find out.
    """
    trial: Any = deepcopy(config)
    trial.num_hidden_layers, trial.layer_types = 1, [kind]
    # any other error has nothing to do with kinds, and loading the model will report it
    with suppress(Exception), torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(
                trial, attn_implementation="eager", trust_remote_code=False
            )
            mask = torch.ones(1, 1, 1, 1)  # 4-d: Transformers would read the values of others
            model(torch.zeros(1, 1, dtype=torch.long), attention_mask=mask, use_cache=False)
        except KeyError as error:
            return error.args != (kind,)
    return True


def unbound_time_steps(model: nn.Module) -> None:
    """Remove the lower bound of the time steps in a model's Mamba layers.

    Some architectures (Nemotron-H, Zamba2) bound them below when a whole sequence is computed, but
    not when a token follows a cache. vLLM never bounds them. So with the bound the log-probs of
    trainer and engine would differ.
    """
    for module in model.modules():
        if isinstance(getattr(module, "time_step_limit", None), tuple | list):
            live: Any = module
            live.time_step_limit = (0.0, live.time_step_limit[1])  # softplus is above 0
