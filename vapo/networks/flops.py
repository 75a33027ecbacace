"""Count a network's floating-point operations, and look up a device's peak.

The count is what the mathematics needs, not what the code does: recomputed activations and logits
count once. A multiplication and an addition are two operations; the backward costs twice the
forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from vapo.config.schema import TrainerConfig
from vapo.networks.token_inputs import TokenInputs

# Dense bfloat16 peaks of NVIDIA's data sheets, in TFLOP/s, by a part of torch's device name.
# The first that fits is taken.
BF16_PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
}


@dataclass(frozen=True)
class ForwardFlops:
    """Cost of one forward pass: for each token, each response token, each squared length.

    A prompt that its responses share is counted once.
    """

    per_token: int
    per_state: int
    per_squared_length: int
    frozen_per_token: int = 0  # of these, by weights that get no gradient
    frozen_per_state: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel, head: nn.Module) -> ForwardFlops:
        """Cost for a dense decoder: 2 a weight and token; the input embedding is a table lookup.

        Causal attention: half of 2 x 2 operations a pair of tokens, layer and channel.
        """
        config = model.config.get_text_config(decoder=True)
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        table = {id(p) for p in model.get_input_embeddings().parameters()}
        backbone = [p for p in model.base_model.parameters() if id(p) not in table]
        return cls(
            per_token=2 * _num(backbone),
            per_state=2 * _num(head.parameters()),
            per_squared_length=2 * config.num_hidden_layers * num_heads * head_dim,
            frozen_per_token=2 * _num(p for p in backbone if not p.requires_grad),
            frozen_per_state=2 * _num(p for p in head.parameters() if not p.requires_grad),
        )

    def count_update(self, inputs: TokenInputs) -> float:
        """Count a forward and its backward, which computes no gradient of frozen weights."""
        spared = self.frozen_per_token * inputs.num_tokens
        return 3 * self.count(inputs) - spared - self.frozen_per_state * len(inputs.targets)

    def count(self, inputs: TokenInputs) -> float:
        """Count one forward pass over all sequences; padding is not counted."""
        # a response beside its prompt attends to all of it, and causally to itself
        squares = sum(s.length * (s.length + 2 * s.prompt_length) for s in inputs.segments)
        return float(
            self.per_token * inputs.num_tokens
            + self.per_state * len(inputs.targets)
            + self.per_squared_length * squares
        )


def _num(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def peak_tflops(trainer: TrainerConfig, dtype: str, device: torch.device) -> float | None:
    """A device's peak for this run: the config's, or a known GPU's in bfloat16. Else None."""
    if trainer.peak_tflops is not None:
        return trainer.peak_tflops
    computes_in_bf16 = dtype == "bfloat16" or trainer.precision.startswith("bf16")
    if device.type != "cuda" or not computes_in_bf16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in BF16_PEAKS.items() if part in name), None)
