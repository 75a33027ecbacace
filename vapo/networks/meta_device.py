"""Networks without weights, on the meta device: from config.json alone, costing no memory.

A sharded run shards them before it fills them; `vapo estimate` counts them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from vapo.networks.loading import check_supported, read_model_config, refusals, remove_dropout

Kind = Literal["causal_lm", "value_model"]


def empty_model(kind: Kind, path: str, *, dtype: str, attn_implementation: str) -> PreTrainedModel:
    """The model that `load_causal_lm` or `load_value_model` would load, without its weights.

    Raises: UserError when config.json cannot be loaded or the model is not supported.
    """
    config = read_model_config(path)
    if kind == "causal_lm":
        check_supported(path, config)
    return model_of_config(
        kind, config, path=path, dtype=dtype, attn_implementation=attn_implementation
    )


def model_of_config(
    kind: Kind,
    config: PreTrainedConfig,
    *,
    path: str,
    dtype: str,
    attn_implementation: str,
    device: str = "meta",
) -> PreTrainedModel:
    """The empty model of a config that has been loaded; `path` is named in errors."""
    auto: Any = AutoModelForCausalLM
    if kind == "value_model":
        auto, config.num_labels = AutoModelForSequenceClassification, 1
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if attn_implementation != "auto":
        options["attn_implementation"] = attn_implementation
    with refusals(path, "model"), torch.device(device):
        model: PreTrainedModel = auto.from_config(config, trust_remote_code=False, **options)
    remove_dropout(model)
    return model
