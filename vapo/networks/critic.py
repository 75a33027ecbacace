"""The critic: a backbone and a head that value the state before every response token."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from vapo.networks.flops import ForwardFlops
from vapo.networks.packed_attention import last_hidden_states
from vapo.networks.token_inputs import TokenInputs
from vapo.networks.value_head import head_in


class CriticOutput(NamedTuple):
    """The values of n states, and of a categorical head the logits that they are the mean of.

    One forward gives both: a sharded network gathers its weights for a forward alone.
    """

    values: Float[Tensor, " n"]
    logits: Float[Tensor, "n K"] | None = None


class Critic(nn.Module):
    """A sequence-classification model, read at every response position.

    A reward model has the same format, so a critic starts from one by loading it. What the outputs
    of its head mean is in the model's config (`vapo.networks.value_head`).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.head = head_in(model.config)
        self.forward_flops = ForwardFlops.of(model, model.get_submodule("score"))

    def forward(self, inputs: TokenInputs) -> CriticOutput:
        """V(s_t) for every response token t, flattened; s_t is the state before the token."""
        states = last_hidden_states(self.model, inputs)
        score = self.model.get_submodule("score")
        outputs = score(states[inputs.state_rows, inputs.state_columns])
        if self.head.kind != "categorical":
            return CriticOutput(self.head.values(outputs))
        logits = outputs.float().clone()  # a view would warn under FSDP2
        return CriticOutput(self.head.values(logits), logits)
