"""The critic: a backbone and a scalar head that value the state before every response token."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from vapo.networks.flops import ForwardFlops
from vapo.networks.packed_attention import last_hidden_states
from vapo.networks.token_inputs import TokenInputs


class Critic(nn.Module):
    """A sequence-classification model with one label, read at every response position.

    A reward model has the same format, so a critic starts from one by loading it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.forward_flops = ForwardFlops.of(model, model.get_submodule("score"))

    def forward(self, inputs: TokenInputs) -> Float[Tensor, " n"]:
        """V(s_t) for every response token t, flattened; s_t is the state before the token."""
        states = last_hidden_states(self.model, inputs)
        head = self.model.get_submodule("score")
        values = head(states[inputs.state_rows, inputs.state_columns])
        return values.squeeze(-1).float().clone()  # a view would warn under FSDP2
