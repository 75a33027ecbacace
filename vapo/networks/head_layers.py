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
    """Give the model new, unfilled linear layers for a head.

    They are `score` on hidden states, and one on log-probs if the head reads them. For a plain
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
    """Make a sequence classifier's class with this head, whose weights `from_pretrained` fills.

    Transformers makes the heads of decoders without a bias, and would not load a folder's bias.
    """

    def init(self: Any, config: PreTrainedConfig, *args: Any, **options: Any) -> None:
        plain.__init__(self, config, *args, **options)
        put_head(self, head)

    return type(plain.__name__, (plain,), {"__init__": init, "__module__": plain.__module__})


@torch.no_grad()
def begin_head(model: PreTrainedModel, plan: HeadPlan) -> None:
    """Replace the model's head by the plan's head, with weight 0 and the plan's bias."""
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
    """Return by name the parameters of a head of weight 0 that values every state at a mean reward.

    Without a mean reward the bias is 0.

    Source: JustRL-II.
    """
    values = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in score.named_parameters()}
    if mean_reward is not None:
        values["bias"].copy_(head.bias_at(mean_reward))
    return values


@torch.no_grad()
def start_head(critic: Critic, mean_reward: float) -> float:
    """Make the head value every state at a mean reward, with weight 0, and return that value.

    The value is the nearest one inside the head's range. The critic is changed in place and may be
    sharded, so every rank must call this. The optimizer's state is unchanged. Several critics start
    alike.
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
