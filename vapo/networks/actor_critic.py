"""The actor and the critic as modules, with one forward pass each over response tokens.

The actor gives log-probs and entropies, without a [tokens, V] tensor; the critic, a backbone and a
head, values the state before the token. Several critics train on disjoint prompts: their mean is
the value, their spread says how unsure it is. `ForwardFlops` is what a pass costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from transformers import PreTrainedModel

from vapo.functional.critic_mixtures import ensemble_mean, ensemble_spread
from vapo.functional.logprob_columns import logprob_columns
from vapo.functional.logprobs import token_logprobs
from vapo.networks.attention_windows import num_windowed_layers
from vapo.networks.experts import num_active
from vapo.networks.logit_transforms import logit_transform
from vapo.networks.lora import adapter_layers, adapters_off
from vapo.networks.packed_attention import computes_on_cpu, hidden_states, last_hidden_states
from vapo.networks.precision import rounded_inputs
from vapo.networks.recurrent_layers import num_attention_layers
from vapo.networks.token_inputs import TokenInputs
from vapo.networks.value_head import HEAD_LAYERS, LOGPROB_SCORE, head_from_config
from vapo.system.process import derive_seed
from vapo.types import RolloutBatch


@dataclass(frozen=True)
class ForwardFlops:
    """The coefficients from which the operations of a network's passes are counted.

    `per_token` counts once for each token, `per_state` for each response token, and
    `per_squared_length` for each sequence's squared length. They are what the mathematics needs,
    not what the code does: recomputed activations and logits count once, and so does a prompt that
    its responses share. A multiplication and an addition are two operations. The backward pass
    takes twice as many as the forward pass.
    """

    per_token: int
    per_state: int
    per_squared_length: int
    frozen_per_token: int = 0  # the part of `per_token` from weights without gradient
    frozen_per_state: int = 0
    window: int | None = None  # the sliding window of some layers; None: no layer has one
    per_windowed: int = 0  # the part of `per_squared_length` from those layers

    @classmethod
    def of(cls, model: PreTrainedModel, head: nn.Module) -> ForwardFlops:
        """Derive the coefficients of a decoder with this head from their weights and config.

        Each weight takes 2 operations a token. Only the experts that a token goes through count,
        and the input embedding is a table lookup, which counts as 0. Causal attention takes half
        of 2 x 2 operations for each pair of tokens, attending layer and channel. A layer with a
        sliding window has only the pairs within the window. What a recurrent layer computes besides
        products with its weights is not counted.
        """
        config = model.config.get_text_config(decoder=True)
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        embedding_ids = {id(p) for p in model.get_input_embeddings().parameters()}
        backbone = [p for p in model.base_model.parameters() if id(p) not in embedding_ids]
        active_counts = num_active(model, model.base_model)
        per_layer = 2 * num_heads * head_dim
        return cls(
            per_token=2 * sum(active_counts[id(p)] for p in backbone),
            per_state=2 * num_parameters(head.parameters()),
            per_squared_length=num_attention_layers(config) * per_layer,
            frozen_per_token=2 * sum(active_counts[id(p)] for p in backbone if not p.requires_grad),
            frozen_per_state=2
            * num_parameters(p for p in head.parameters() if not p.requires_grad),
            window=getattr(config, "sliding_window", None),
            per_windowed=num_windowed_layers(config) * per_layer,
        )

    def count_update(self, inputs: TokenInputs) -> float:
        """Count the operations of a forward and a backward pass.

        The backward pass computes no gradients of frozen weights.
        """
        frozen_flops = self.frozen_per_token * inputs.num_tokens
        return 3 * self.count(inputs) - frozen_flops - self.frozen_per_state * len(inputs.targets)

    def count(self, inputs: TokenInputs) -> float:
        """Count the operations of one forward pass over all sequences; padding is not counted."""
        return float(
            self.per_token * inputs.num_tokens
            + self.per_state * len(inputs.targets)
            + sum(self.attention(s.length, s.prompt_length) for s in inputs.segments)
        )

    def attention(self, length: float, num_earlier: float = 0) -> float:
        """Count the operations with which `length` tokens attend causally to one another, and to
        all of the `num_earlier` tokens in front of them."""
        squares = length * (length + 2 * num_earlier)
        if self.window is None:
            return self.per_squared_length * squares
        # tokens that the window does not limit
        num_whole = min(max(self.window - num_earlier, 0), length)
        windowed_squares = num_whole * (num_whole + 2 * num_earlier)
        windowed_squares += 2 * self.window * (length - num_whole)
        return self.per_squared_length * squares - self.per_windowed * (squares - windowed_squares)


def num_parameters(parameters: Iterable[nn.Parameter]) -> int:
    """Return how many numbers the parameters have together."""
    return sum(p.numel() for p in parameters)


class ActorOutput(NamedTuple):
    """What the actor computes at n response tokens. A field that was not requested is None.

    `entropy` is in nats. `states` are the hidden states before the tokens, of the requested layers.
    `collisions` are the sums over the vocabulary of the squared probabilities.
    """

    logprobs: Float[Tensor, " n"] | None
    entropy: Float[Tensor, " n"] | None
    states: Float[Tensor, "n L H"] | None = None
    collisions: Float[Tensor, " n"] | None = None


class Actor(nn.Module):
    """A causal language model as the policy. All of its passes go through `forward`.

    FSDP gathers sharded weights only for a call of `forward`.

    Args:
        rounds: whether products of the output layer may round their inputs (`may_round_products`).
    """

    def __init__(self, model: PreTrainedModel, *, rounds: bool = False) -> None:
        super().__init__()
        self.model = model
        self.rounds = rounds
        name = model.name_or_path or type(model).__name__
        self.logit_transform = logit_transform(name, model.config)
        self.forward_flops = ForwardFlops.of(model, model.get_output_embeddings())

    def forward(
        self,
        inputs: TokenInputs,
        *,
        temperature: float | None,
        layers: Sequence[int] = (),
        wants_entropy: bool = True,
        wants_collisions: bool = False,
    ) -> ActorOutput:
        """Compute the policy's log-prob and entropy (nats) at every response token, flattened.

        The hidden state before a token predicts it. The policy is the distribution at the
        sampling temperature, without top-p and top-k.

        Args:
            temperature: None: only the states are returned, and where possible the layers after
                the requested ones are not run.
            layers: the layers whose states are returned, too. 0 is the embedding; -1 are the
                states from which the token is predicted.
        """
        places = inputs.state_rows, inputs.state_columns
        by_layer = hidden_states(self.model, inputs, layers, wants_last=temperature is not None)
        states = [by_layer[layer][places] for layer in layers]
        stacked_states = torch.stack(states, dim=1) if states else None
        if temperature is None:
            return ActorOutput(None, None, stacked_states)
        last, lm_head_weight = by_layer[-1], self.model.get_output_embeddings().weight
        collisions = None
        if wants_collisions:
            dtype = torch.promote_types(last.dtype, torch.float32)
            collisions = last.new_empty(len(inputs.targets), dtype=dtype)
        logprobs, entropy = token_logprobs(
            last[places],
            lm_head_weight,
            inputs.targets,
            temperature=temperature,
            transform=self.logit_transform,
            on_cpu=computes_on_cpu(last),
            rounding=rounded_inputs if self.rounds else None,
            wants_entropy=wants_entropy,
            collisions=collisions,
        )
        return ActorOutput(logprobs, entropy if wants_entropy else None, stacked_states, collisions)


class FrozenBase(nn.Module):
    """The reference policy of an actor with LoRA adapters: the same actor with its adapters off."""

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self.actor = actor
        self._adapters = adapter_layers(actor)

    @property
    def model(self) -> PreTrainedModel:
        return self.actor.model

    def forward(
        self, inputs: TokenInputs, *, temperature: float, wants_entropy: bool = True
    ) -> ActorOutput:
        """Run the actor's forward pass with the adapters off."""
        with adapters_off(self._adapters):
            output: ActorOutput = self.actor(
                inputs, temperature=temperature, wants_entropy=wants_entropy
            )
        return output


class CriticOutput(NamedTuple):
    """The values of n states, and the logits of a categorical head.

    `logits` is None if the head is not categorical. One forward pass gives both, because a sharded
    network gathers its weights only for a forward pass. With several critics `members` has the
    values of each, and `values` their mean; with one critic `members` is None.
    """

    values: Float[Tensor, " n"]
    logits: Float[Tensor, "n K"] | None = None
    members: Float[Tensor, "n M"] | None = None


class Critic(nn.Module):
    """A sequence-classification model that gives a value before every response token.

    A reward model has the same format, so a critic can start from one by loading it. The model's
    config says what the outputs of its head mean (`vapo.networks.value_head`).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.head = head_from_config(model.config)
        self.forward_flops = self._flops()

    @property
    def layers(self) -> tuple[int, ...]:
        """The actor's layers whose states the critic reads; empty if it reads tokens."""
        return self.head.layers or ()

    @property
    def head_layers(self) -> list[nn.Module]:
        return [layer for name, layer in self.model.named_children() if name in HEAD_LAYERS]

    def _flops(self) -> ForwardFlops:
        return ForwardFlops.of(self.model, self.model.get_submodule("score"))

    def states(self, inputs: TokenInputs) -> Float[Tensor, "n F"]:
        """Return the hidden states before each of the n response tokens, which the head reads."""
        states = last_hidden_states(self.model, inputs)
        return states[inputs.state_rows, inputs.state_columns]

    def columns(self, inputs: TokenInputs) -> Float[Tensor, "n C"]:
        """Return the features before each response token that the head derives from log-probs.

        Raises: ValueError: the inputs have no log-probs of sampled tokens.
        """
        if inputs.sampled_logprobs is None:
            raise ValueError("the value head reads log-probs, and these tokens were not sampled")
        columns = logprob_columns(inputs.sampled_logprobs, inputs.response_mask)
        return columns[inputs.response_mask]

    def forward(self, inputs: TokenInputs) -> CriticOutput:
        """Return V(s_t) for every response token t, flattened; s_t is the state before token t."""
        outputs = _apply_in_float32(self.model.get_submodule("score"), self.states(inputs))
        if self.head.num_logprob_columns is not None:
            layer = self.model.get_submodule(LOGPROB_SCORE)
            outputs = outputs + _apply_in_float32(layer, self.columns(inputs))
        if self.head.kind != "categorical":
            return CriticOutput(self.head.values(outputs))
        logits = outputs.clone()  # a view would warn under FSDP2
        return CriticOutput(self.head.values(logits), logits)


def _apply_in_float32(layer: nn.Module, inputs: Float[Tensor, "n F"]) -> Float[Tensor, "n K"]:
    """Apply a layer of the head in float32, whatever the network computes in.

    In bfloat16, values from 1/2 to 1 would be multiples of 1/256. Weights of another dtype are cast
    to float32. A sharded layer gathers its weights in float32 already (`shard`).
    """
    with torch.autocast(inputs.device.type, enabled=False):
        if isinstance(layer, FSDPModule):
            return cast(Tensor, layer(inputs.float()))
        named_tensors = (*layer.named_parameters(), *layer.named_buffers())
        float32_tensors = {
            name: tensor.float() for name, tensor in named_tensors if tensor.is_floating_point()
        }
        return cast(Tensor, functional_call(layer, float32_tensors, inputs.float()))


class CriticEnsemble(Critic):
    """M critics of one architecture as one network, with one optimizer and one gradient norm.

    Source: AsyPPO (arXiv 2510.01656), which does not say which member trains on which prompts.
    Here the prompt's tokens decide (`member_of_prompt`). So a prompt trains the same member in
    every iteration, run and process.

    `model`, `head` and `forward_flops` are the first member's. A training forward runs one member.
    """

    def __init__(self, members: Sequence[Critic]) -> None:
        nn.Module.__init__(self)
        self.members = nn.ModuleList(members)
        first = members[0]
        self.__dict__["model"] = first.model  # not a submodule: its weights would have two names
        self.head, self.forward_flops = first.head, first.forward_flops

    def forward(self, inputs: TokenInputs, *, member: int | None = None) -> CriticOutput:
        """Return the output of the member with this number; if None, all values and their mean."""
        members = members_of(self)
        if member is not None:
            return cast(CriticOutput, members[member](inputs))
        values = torch.stack([critic(inputs).values for critic in members], dim=1)
        return CriticOutput(ensemble_mean(values), members=values)


def members_of(critic: Critic | None) -> list[Critic]:
    """Return the members of an ensemble, a single critic in a list, or an empty list for None."""
    if critic is None:
        return []
    if isinstance(critic, CriticEnsemble):
        return cast(list[Critic], list(critic.members))
    return [critic]


def member_of_prompt(prompt_ids: Sequence[int], count: int) -> int:
    """Return the number, below `count`, of the ensemble's member that trains on a prompt.

    It is a hash of the prompt's tokens, so it is the same in all runs.
    """
    return derive_seed("critic member", *prompt_ids) % count


def forward_of_rows(
    critic: Critic, inputs: TokenInputs, members: Int[Tensor, " b"] | None
) -> CriticOutput:
    """Return the output of the critic, or of the one ensemble member that trains on these rows.

    Args:
        members: the number of the member for each row, the same in all rows. None: the critic is
            not an ensemble.
    """
    if members is None:
        return cast(CriticOutput, critic(inputs))
    return cast(CriticOutput, critic(inputs, member=int(members[0])))


def ensemble_columns(batch: RolloutBatch, values: Float[Tensor, "B T M"]) -> dict[str, Tensor]:
    """Return by name the columns that an ensemble of critics adds to a batch.

    `critic_members` has the number of the member that trains on each row, `old_member_values` that
    member's values, and `value_spread` how far the members' values differ at each token.

    Args:
        values: each member's value for each token.
    """
    count = values.shape[2]
    members = torch.tensor([member_of_prompt(r.prompt.prompt_ids, count) for r in batch.rollouts])
    return {
        "critic_members": members,
        "value_spread": ensemble_spread(values),
        "old_member_values": values[torch.arange(len(members)), :, members],
    }
