"""The critic: a backbone and a head that value the state before every response token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import PreTrainedModel

from vapo.functional.sampling_features import sampling_features
from vapo.networks.flops import ForwardFlops
from vapo.networks.packed_attention import last_hidden_states
from vapo.networks.token_inputs import TokenInputs
from vapo.networks.value_head import LOGPROB_SCORE, head_in, start_values
from vapo.system.distributed import reshard


class CriticOutput(NamedTuple):
    """The values of n states, and of a categorical head the logits that they are the mean of.

    One forward gives both: a sharded network gathers its weights for a forward alone. Of several
    critics `members` are the values of each, and `values` their mean.
    """

    values: Float[Tensor, " n"]
    logits: Float[Tensor, "n K"] | None = None
    members: Float[Tensor, "n M"] | None = None


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
        if self.head.num_logprob_columns is not None:
            layer = self.model.get_submodule(LOGPROB_SCORE)
            columns = _logprob_columns(inputs).to(layer.get_parameter("weight").dtype)
            outputs = outputs + layer(columns)
        if self.head.kind != "categorical":
            return CriticOutput(self.head.values(outputs))
        logits = outputs.float().clone()  # a view would warn under FSDP2
        return CriticOutput(self.head.values(logits), logits)


def _logprob_columns(inputs: TokenInputs) -> Float[Tensor, "n F"]:
    """What the head reads beside the hidden state that precedes each response token."""
    if inputs.sampled_logprobs is None:
        raise ValueError("the value head reads log-probs, and these tokens were not sampled")
    columns = sampling_features(inputs.sampled_logprobs, inputs.response_mask)
    return columns[inputs.response_mask]


@torch.no_grad()
def start_head(critic: Critic, mean_reward: float) -> float:
    """Set the head's weight to 0 and its bias to that of a mean reward, and return its value.

    In place, maybe sharded: every rank must call it. The value is the nearest one inside of the
    head's range. The optimizer's state is left as it is.
    """
    value = critic.head.within(mean_reward)
    reshard(critic)  # a whole copy of an earlier forward would stay as it was
    start = start_values(critic.model.get_submodule("score"), critic.head, value)
    set_model_state_dict(
        critic,
        {f"model.score.{name}": values for name, values in start.items()},
        options=StateDictOptions(full_state_dict=True, strict=False),
    )
    return value
