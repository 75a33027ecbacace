"""What a pass through a network costs, in operations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from vapo.networks.token_inputs import TokenInputs


@dataclass(frozen=True)
class ForwardFlops:
    """Cost of one forward pass in operations: for each token, response token, squared length.

    What the mathematics needs, not what the code does: recomputed activations and logits count
    once, and so does a prompt that its responses share. A multiplication and an addition are two
    operations; the backward costs twice the forward.
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
            per_token=2 * num_of(backbone),
            per_state=2 * num_of(head.parameters()),
            per_squared_length=2 * config.num_hidden_layers * num_heads * head_dim,
            frozen_per_token=2 * num_of(p for p in backbone if not p.requires_grad),
            frozen_per_state=2 * num_of(p for p in head.parameters() if not p.requires_grad),
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


def num_of(parameters: Iterable[nn.Parameter]) -> int:
    """How many numbers they are in all."""
    return sum(p.numel() for p in parameters)
