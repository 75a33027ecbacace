"""Random models of the real families with sliding windows, at a tiny shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.cohere2 import Cohere2Config
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.mistral import MistralConfig
from transformers.models.olmo3 import Olmo3Config
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen3 import Qwen3Config

from tests.tiny_model import SIZES, tiny_tokenizer
from vapo.networks.attention_windows import attention_options

WINDOW = 8
SMALL: dict[str, Any] = {**SIZES, "intermediate_size": 48}
_BOTH: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
_GEMMA: dict[str, Any] = {**_BOTH, "head_dim": 8, "query_pre_attn_scalar": 8}
_QWEN: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 1}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}
# caps that bend: at the sizes of real models they would change nothing here
_CAPS: dict[str, Any] = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}
_WIDTHS: dict[str, Any] = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "gemma3": lambda **o: Gemma3TextConfig(**(_GEMMA | o)),
    "gemma2": lambda **o: Gemma2Config(**(_GEMMA | _CAPS | o)),
    "gpt_oss": lambda **o: GptOssConfig(**(_BOTH | _EXPERTS | {"head_dim": 8} | o)),
    "mistral": lambda **o: MistralConfig(**o),
    "phi3": lambda **o: Phi3Config(original_max_position_embeddings=128, **o),
    "qwen2": lambda **o: Qwen2Config(**(_QWEN | o)),
    "qwen3": lambda **o: Qwen3Config(**(_QWEN | {"head_dim": 8} | o)),
    # its layers do not tell the attention function of their window
    "qwen2_moe": lambda **o: Qwen2MoeConfig(**(_QWEN | _EXPERTS | _WIDTHS | o)),
    "cohere2": lambda **o: Cohere2Config(**(_BOTH | {"logit_scale": 0.25} | o)),
    "olmo3": lambda **o: Olmo3Config(**(_BOTH | o)),
}
PACKED = sorted(CONFIGS.keys() - {"gemma2", "gpt_oss"})  # these need eager attention


def windowed_model(
    family: str, *, attn_implementation: str = "auto", **options: Any
) -> PreTrainedModel:
    """A causal language model; the same weights whatever its window."""
    settings = SMALL | {"vocab_size": len(tiny_tokenizer()), "sliding_window": WINDOW} | options
    config = CONFIGS[family](**settings)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, **attention_options(family, config, attn_implementation)
    )
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):  # else they are too small to matter
            torch.nn.init.normal_(weight, std=1.0)
    return model.eval()
