"""Tiny random models of the families that people train, each of the real family's own class.

docs/models.md has a row for each, in this order.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.tiny_model import tiny_tokenizer

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # so that next-token distributions are far from flat
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_LINEAR, _FULL, _WINDOW, _BOTH = (
    "linear_attention",
    "full_attention",
    "sliding_attention",
    "hybrid",
)
_DELTA_NET = {
    "layer_types": [_LINEAR, _FULL, _LINEAR, _FULL],
    "initializer_range": 0.1,  # its chunks' rounding grows with the weights
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class Architecture:
    """A family: its name in the table, the type in its config.json, and a tiny config's values.

    `lacks` are the columns of the table that are one clear error.
    """

    name: str
    model_type: str
    values: dict[str, Any] = field(default_factory=dict)
    num_layers: int | None = 4  # None: the layers' list alone says it
    lacks: frozenset[str] = frozenset()

    def config(self, **changes: Any) -> PreTrainedConfig:
        sizes = {**_SIZES, "vocab_size": len(tiny_tokenizer())}
        if self.num_layers is not None:
            sizes["num_hidden_layers"] = self.num_layers
        config = AutoConfig.for_model(self.model_type, **{**sizes, **self.values, **changes})
        assert isinstance(config, PreTrainedConfig)
        return config

    def model(self, **changes: Any) -> PreTrainedModel:
        """A random model, the same at every call."""
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(self.config(**changes))
        return model.eval()


def _hybrid(
    name: str, model_type: str, values: dict[str, Any], lacks: Set[str] = frozenset(), **more: Any
) -> Architecture:
    """A family with recurrent layers, whose rows are padded."""
    lacks = frozenset({"packed", "shared prompts"} | lacks)
    return Architecture(name, model_type, values, lacks=lacks, **more)


HYBRIDS = (
    _hybrid("Qwen3.5", "qwen3_5_text", _DELTA_NET),
    _hybrid(
        "Qwen3.5-MoE",
        "qwen3_5_moe_text",
        {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    _hybrid(
        "Qwen3-Next",
        "qwen3_next",
        {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    _hybrid("Olmo-Hybrid", "olmo_hybrid", {k: v for k, v in _DELTA_NET.items() if k != "head_dim"}),
    _hybrid(
        "Granite 4 (hybrid)",
        "granitemoehybrid",
        {
            **_MAMBA_2,
            "layer_types": [_LINEAR, _FULL, _LINEAR, _LINEAR],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    _hybrid("Bamba", "bamba", {**_MAMBA_2, "attn_layer_indices": [1]}),
    _hybrid("Falcon-H1", "falcon_h1", {**_MAMBA_2, "mamba_d_ssm": 64, "head_dim": 8}),
    _hybrid(
        "Nemotron-H",
        "nemotron_h",
        {
            "layers_block_type": [_LINEAR, "moe", _FULL, "mlp", _LINEAR],
            "head_dim": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 16,
        },
        num_layers=None,
    ),
    _hybrid(
        "Zamba2",
        "zamba2",
        {
            "layers_block_type": [_LINEAR, _BOTH, _LINEAR, _BOTH],
            "num_key_value_heads": 4,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "chunk_size": 8,
            "adapter_rank": 4,
        },
        lacks={"LoRA"},  # two layers have one module's weights
    ),
    _hybrid(
        "Jamba",
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    _hybrid("LFM2", "lfm2", {"layer_types": ["conv", _FULL, "conv", _FULL]}),
    _hybrid(
        "LFM2-MoE",
        "lfm2_moe",
        {**_EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", _FULL, "conv", _FULL]},
    ),
)

MIXTURES = (
    Architecture(
        "Qwen3-MoE",
        "qwen3_moe",
        {**_EXPERTS, "head_dim": 8, "norm_topk_prob": True},
        2,
        lacks=frozenset({"vLLM on a CPU"}),
    ),
    Architecture("OLMoE", "olmoe", {**_EXPERTS, "intermediate_size": 24}, 2),
    Architecture("Mixtral", "mixtral", {"num_local_experts": 4, "intermediate_size": 24}, 2),
    Architecture("Granite 3 (MoE)", "granitemoe", {"num_local_experts": 4}, 2),
)
PLAIN = (
    Architecture("Qwen2.5", "qwen2", {}, 2),
    Architecture("Qwen3", "qwen3", {"head_dim": 8}, 2),
    Architecture("Llama 3, SmolLM2", "llama", {}, 2),
)
WINDOWS = (
    Architecture("Mistral", "mistral", {"sliding_window": 8}, 2),
    Architecture(
        "Gemma 3",
        "gemma3_text",
        {"sliding_window": 8, "head_dim": 8, "layer_types": [_WINDOW, _FULL]},
        2,
    ),
    Architecture(
        "gpt-oss",
        "gpt_oss",
        {
            "sliding_window": 8,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": [_WINDOW, _FULL],
        },
        2,
        frozenset({"packed", "shared prompts"}),  # its attention is computed eagerly
    ),
)
"""Those whose layers attend to a window."""
COLUMNS = (
    "packed",
    "shared prompts",
    "built-in engine",
    "vLLM on a CPU",
    "LoRA",
    "critic",
    "export and reload",
)
ON_VLLM = ("Qwen2.5", "Qwen3", "Llama 3, SmolLM2", "Mistral", "Gemma 3")
"""Those whose tiny models the tests of the mark `vllm` sample with it."""
BY_DAY = ("Qwen3-MoE", "Qwen3.5", "Granite 4 (hybrid)", "Falcon-H1")
"""Those that every run of the tests checks; the others are checked at night."""
ALL = (*PLAIN, *WINDOWS, *MIXTURES, *HYBRIDS)
