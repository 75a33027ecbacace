"""The layers of a critic's head in a live model: put there, and filled where they start anew."""

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
    """Give the model a new linear head, of weights yet to be filled: the layer `score` on hidden
    states, and the one on log-probs if the head reads them. A plain scalar one it has already."""
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
    """A sequence classifier's class with this head, for `from_pretrained` to fill.

    Transformers makes the heads of decoders without a bias and would leave the folder's out.
    """

    def init(self: Any, config: PreTrainedConfig, *args: Any, **options: Any) -> None:
        plain.__init__(self, config, *args, **options)
        put_head(self, head)

    return type(plain.__name__, (plain,), {"__init__": init, "__module__": plain.__module__})


@torch.no_grad()
def begin_head(model: PreTrainedModel, plan: HeadPlan) -> None:
    """Put the plan's head, of weight 0, in the place of the one that the model was made with."""
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
    """The parameters of a head of weight 0 whose bias is that of a mean reward, by name.

    Source: JustRL-II.
    """
    values = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in score.named_parameters()}
    if mean_reward is not None:
        values["bias"].copy_(head.bias_at(mean_reward))
    return values


@torch.no_grad()
def start_head(critic: Critic, mean_reward: float) -> float:
    """Set the head's weight to 0 and its bias to that of a mean reward, and return its value.

    In place, maybe sharded: every rank must call it. The value is the nearest one inside of the
    head's range. The optimizer's state is left as it is. Several critics start alike.
    """
    value = critic.head.within(mean_reward)
    for member in members_of(critic):
        reshard(member)  # a whole copy of an earlier forward would stay as it was
        start = start_values(member.model.get_submodule("score"), member.head, value)
        set_model_state_dict(
            member,
            {f"model.score.{name}": values for name, values in start.items()},
            options=StateDictOptions(full_state_dict=True, strict=False),
        )
    return value
