"""The actor: log-probs and entropy of response tokens, without a [tokens, V] tensor."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from vapo.functional.logprobs import rows_of_logits, token_logprobs
from vapo.networks.flops import ForwardFlops
from vapo.networks.lora import adapters_off
from vapo.networks.packed_attention import computes_on_cpu, last_hidden_states
from vapo.networks.token_inputs import TokenInputs


class Actor(nn.Module):
    """A causal language model, called through one entry that sharding can wrap."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.forward_flops = ForwardFlops.of(model, model.get_output_embeddings())

    def forward(
        self, inputs: TokenInputs, *, temperature: float
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """Log-prob and entropy (nats) of the policy at every response token, flattened.

        The hidden state before a token predicts it. The policy is the distribution at the
        sampling temperature, without top-p and top-k.
        """
        states = last_hidden_states(self.model, inputs)
        lm_head_weight = self.model.get_output_embeddings().weight
        return token_logprobs(
            states[inputs.state_rows, inputs.state_columns],
            lm_head_weight,
            inputs.targets,
            temperature=temperature,
            chunk_size=rows_of_logits(lm_head_weight.shape[0], on_cpu=computes_on_cpu(states)),
        )


class FrozenBase(nn.Module):
    """An actor with adapters as it was before training: the reference policy."""

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self.actor = actor

    @property
    def model(self) -> PreTrainedModel:
        return self.actor.model

    def forward(
        self, inputs: TokenInputs, *, temperature: float
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """Run the actor's forward pass with the adapters off."""
        with adapters_off(self.actor):
            logprobs, entropy = self.actor(inputs, temperature=temperature)
        return logprobs, entropy
