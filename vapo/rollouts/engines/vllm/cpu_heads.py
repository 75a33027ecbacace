"""Attention heads of a size that vLLM's CPU kernels do not have, padded with zeros.

The kernels support some head sizes only; a GPU's support all that are used. A model of the Llama or
Qwen2 kind with smaller heads runs as Llama with longer ones: the first `size` places of each head
are the model's own, the others 0. Scores are sums over places, so they are the same but for the
kernel's factor 1 / sqrt(padded) in place of 1 / sqrt(size), which the queries make up for, and the
rotation turns the first `size` places by the angles that it had (Llama's partial rotary factor).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from vapo.errors import UserError

_KERNELS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM 0.32
_LLAMA_KINDS = ("llama", "qwen2")
# The model's own size, in the config that the padding overrides, for a server to find.
HEAD_SIZE = "vapo_head_size"


@dataclass(frozen=True)
class PaddedHeads:
    """Pads attention heads of size `size` to size `padded`, which vLLM has a CPU kernel for.

    `overrides` are the entries of the model's config that change with that.
    """

    size: int
    padded: int
    overrides: dict[str, Any]

    def weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's weights by name, with zeros added to those of attention heads."""
        missing = self.padded - self.size
        for name, tensor in weights:
            layer = name.rpartition(".self_attn.")[2]
            if layer.startswith(("q_proj", "k_proj", "v_proj")):
                heads = tensor.unflatten(0, (-1, self.size))
                if layer.startswith("q_proj"):
                    heads = heads * (self.padded / self.size) ** 0.5
                after = (0, 0) * (heads.dim() - 2)
                yield name, pad(heads, (*after, 0, missing)).flatten(0, 1)
            elif layer == "o_proj.weight":
                yield name, pad(tensor.unflatten(1, (-1, self.size)), (0, missing)).flatten(1)
            else:
                yield name, tensor


def padded_heads(config: PretrainedConfig) -> PaddedHeads | None:
    """Return how a model's attention heads are padded on a CPU; None if they need no padding.

    Raises: UserError: vLLM has no kernel for heads of this size, and they cannot be padded.
    """
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size in _KERNELS:
        return None
    padded = next((kernel for kernel in _KERNELS if kernel > size), None)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    is_llama = config.model_type in _LLAMA_KINDS and "partial_rotary_factor" not in rope
    has_window = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if padded is None or not is_llama or has_window:
        raise UserError(
            f"rollouts.engine=vllm: on a CPU vLLM has no attention kernel for heads of {size} "
            f"(only {', '.join(map(str, _KERNELS))}), and vapo pads those of Llama and Qwen2 "
            "models alone: set rollouts.engine=transformers"
        )
    biased = config.model_type == "qwen2"  # its queries, keys and values have biases, always
    return PaddedHeads(
        size,
        padded,
        {
            "architectures": ["LlamaForCausalLM"],
            "head_dim": padded,
            HEAD_SIZE: size,
            "qkv_bias": biased or bool(getattr(config, "attention_bias", False)),
            "rope_parameters": {**rope, "partial_rotary_factor": size / padded},
        },
    )
