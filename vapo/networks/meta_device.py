"""Networks without weights, on the meta device: made from config.json alone, without memory.

A sharded run shards them before it fills them, and `vapo estimate` counts them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from vapo.config.critic import CriticConfig
from vapo.networks.attention_windows import attention_options
from vapo.networks.classifiers import register_classifier
from vapo.networks.experts import spread_evenly
from vapo.networks.head_layers import put_head
from vapo.networks.loading import remove_dropout
from vapo.networks.model_configs import (
    check_supported,
    read_model_config,
    read_value_config,
    refusals,
)
from vapo.networks.recurrent_layers import unbound_time_steps
from vapo.networks.tied_embeddings import untie_as_saved
from vapo.networks.value_head import head_from_config, plan_head, write_head

Kind = Literal["causal_lm", "value_model"]


def empty_model(kind: Kind, path: str, *, dtype: str, attn_implementation: str) -> PreTrainedModel:
    """Make the model that `load_causal_lm` or `load_value_model` would load, without its weights.

    Its parameters are on the meta device, which gives them shapes but no memory.

    Raises: UserError: config.json cannot be loaded or the model is not supported.
    """
    config = read_model_config(path)
    if kind == "causal_lm":
        check_supported(path, config)
        untie_as_saved(path, config)
    else:
        write_head(config, plan_head(config, path, None).head)
    return model_of_config(
        kind, config, path=path, dtype=dtype, attn_implementation=attn_implementation
    )


def empty_value_model(path: str, critic: CriticConfig) -> PreTrainedModel:
    """Make a run's critic without its weights, with the head that its config describes.

    Raises: UserError: config.json cannot be loaded, or its head does not fit.
    """
    config = read_value_config(path, critic)
    write_head(config, plan_head(config, path, critic).head)
    return model_of_config(
        "value_model",
        config,
        path=path,
        dtype=critic.dtype,
        attn_implementation=critic.attn_implementation,
    )


def model_of_config(
    kind: Kind,
    config: PreTrainedConfig,
    *,
    path: str,
    dtype: str,
    attn_implementation: str,
) -> PreTrainedModel:
    """Make the model of a loaded config on the meta device, without weights. Errors name `path`.

    A value model gets the head that `write_head` wrote into the config, or a scalar one.
    """
    auto: Any = AutoModelForCausalLM
    head = head_from_config(config) if kind == "value_model" else None
    if head is not None:
        register_classifier(config)
        auto, config.num_labels = AutoModelForSequenceClassification, head.num_outputs
    options = attention_options(path, config, attn_implementation)
    options["dtype"] = getattr(torch, dtype)
    with refusals(path, "model"), torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config, trust_remote_code=False, **options)
        if head is not None:
            put_head(model, head)
    remove_dropout(model)
    unbound_time_steps(model)
    return model


def fill_with_fakes(network: nn.Module) -> None:
    """Replace a network's meta tensors by fake ones on the CPU. Call this inside a FakeTensorMode.

    The network must have been made on the meta device, since fake parameters cannot be moved, and
    peft moves parameters.
    """
    fakes: dict[int, Tensor] = {}
    for module in network.modules():
        module_tensors = (
            module.named_parameters(recurse=False),
            module.named_buffers(recurse=False),
        )
        for name, tensor in [pair for pairs in module_tensors for pair in pairs]:
            if id(tensor) not in fakes:  # else it is tied
                fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                fakes[id(tensor)] = fake
            setattr(module, name, fakes[id(tensor)])
    spread_evenly(network)
