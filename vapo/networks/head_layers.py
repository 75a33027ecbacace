"""Put the layers of a critic's head into a live model, and fill those that start anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import PreTrainedConfig, PreTrainedModel

from vapo.networks.actor_critic import Critic, members_of
from vapo.networks.value_head import LOGPROB_SCORE, HeadPlan, ValueHead, write_head
from vapo.system.distributed import reshard


def put_head(model: Any, head: ValueHead) -> None:
    """Replace a model's head by new linear layers with the shapes of `head`; weights are not set.

    They are `score` on hidden states, and a layer on log-probs if the head reads them. For a plain
    scalar head nothing changes, because the model has that one already.
    """
    if head == ValueHead():
        return
    old = model.get_submodule("score")
    assert isinstance(old, nn.Linear)
    factory_options: Any = {"dtype": old.weight.dtype, "device": old.weight.device}
    model.score = nn.Linear(
        old.in_features, head.num_outputs, bias=head.has_bias, **factory_options
    )
    if head.num_logprob_columns is not None:
        layer = nn.Linear(head.num_logprob_columns, head.num_outputs, bias=False, **factory_options)
        model.add_module(LOGPROB_SCORE, layer)


def class_with_head(plain: Any, head: ValueHead) -> Any:
    """Return a subclass of the sequence classifier `plain` whose models are made with this head.

    `from_pretrained` of the subclass then loads all weights of the head. Transformers' own classes
    for decoders have a head without a bias, and would not load a folder's bias.
    """

    def init(self: Any, config: PreTrainedConfig, *args: Any, **options: Any) -> None:
        plain.__init__(self, config, *args, **options)
        put_head(self, head)

    return type(plain.__name__, (plain,), {"__init__": init, "__module__": plain.__module__})


@torch.no_grad()
def begin_head(model: PreTrainedModel, plan: HeadPlan) -> None:
    """Give a model the plan's head with weight 0, and write that head into the model's config.

    Its bias gives every state the plan's mean reward as value; without a mean reward it is 0.
    """
    write_head(model.config, plan.head)
    put_head(model, plan.head)
    score = model.get_submodule("score")
    for name, values in start_values(score, plan.head, plan.mean_reward).items():
        score.get_parameter(name).copy_(values)
    if hasattr(model, LOGPROB_SCORE):
        begin_at_zero(model, [f"{LOGPROB_SCORE}.weight"])


@torch.no_grad()
def begin_at_zero(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Set the parameters of these names to 0."""
    for name in names:
        model.get_parameter(name).zero_()


def start_values(score: nn.Module, head: ValueHead, mean_reward: float | None) -> dict[str, Tensor]:
    """Return the parameters of `score`, by name, with which every state's value is a mean reward.

    The weight is 0. If `mean_reward` is None, the bias is 0, too.

    Source: JustRL-II.
    """
    values = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in score.named_parameters()}
    if mean_reward is not None:
        values["bias"].copy_(head.bias_at(mean_reward))
    return values


@torch.no_grad()
def start_head(critic: Critic, mean_reward: float) -> float:
    """Set a critic's head so that every state has a mean reward as value, and return that value.

    It is the value nearest to `mean_reward` inside the head's range. The head's weight becomes 0.
    The critic is changed in place and may be sharded, so every rank must call this. The optimizer's
    state is unchanged. The members of an ensemble all get the same values.
    """
    value = critic.head.within(mean_reward)
    for member in members_of(critic):
        reshard(member)  # else weights gathered by an earlier forward would stay
        start = start_values(member.model.get_submodule("score"), member.head, value)
        set_model_state_dict(
            member,
            {f"model.score.{name}": values for name, values in start.items()},
            options=StateDictOptions(full_state_dict=True, strict=False),
        )
    return value
