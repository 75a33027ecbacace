"""Several critics on disjoint prompts: their mean is the value, their spread says how unsure it is.

Source: AsyPPO (arXiv 2510.01656). Which prompts are whose is not found there; here a prompt's
tokens decide, so that a member never trains on another's prompts, in whatever order, iteration,
run or process they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vapo.functional.critic_mixtures import ensemble_mean, ensemble_spread
from vapo.networks.critic import Critic, CriticOutput, start_head
from vapo.networks.token_inputs import TokenInputs
from vapo.system.process import derive_seed
from vapo.types import RolloutBatch


class CriticEnsemble(Critic):
    """M critics of one architecture as one network: one optimizer, one gradient norm.

    `model`, `head` and `forward_flops` are the first member's; a training forward is one member's.
    """

    def __init__(self, members: Sequence[Critic]) -> None:
        nn.Module.__init__(self)
        self.members = nn.ModuleList(members)
        first = members[0]
        self.__dict__["model"] = first.model  # not a submodule: its weights would have two names
        self.head, self.forward_flops = first.head, first.forward_flops

    def forward(self, inputs: TokenInputs, *, member: int | None = None) -> CriticOutput:
        """One member's output; None: the mean of all members' values, and each member's."""
        members = members_of(self)
        if member is not None:
            return cast(CriticOutput, members[member](inputs))
        values = torch.stack([one(inputs).values for one in members], dim=1)
        return CriticOutput(ensemble_mean(values), members=values)


def members_of(critic: Critic | None) -> list[Critic]:
    """The members of an ensemble, or the one critic; none of None."""
    if critic is None:
        return []
    if isinstance(critic, CriticEnsemble):
        return cast(list[Critic], list(critic.members))
    return [critic]


def start_heads(critic: Critic, mean_reward: float) -> float:
    """`critic.start_head` of each member: they start alike."""
    (value,) = {start_head(member, mean_reward) for member in members_of(critic)}
    return value


def member_of_prompt(prompt_ids: Sequence[int], count: int) -> int:
    """Which of `count` members trains on a prompt: a hash of its tokens, alike in all runs."""
    return derive_seed("critic member", *prompt_ids) % count


def forward_of_rows(
    critic: Critic, inputs: TokenInputs, members: Int[Tensor, " b"] | None
) -> CriticOutput:
    """The output of the member that trains on these rows, which are all of one member."""
    if members is None:
        return cast(CriticOutput, critic(inputs))
    return cast(CriticOutput, critic(inputs, member=int(members[0])))


def ensemble_columns(batch: RolloutBatch, values: Float[Tensor, "B T M"]) -> dict[str, Tensor]:
    """What an ensemble adds to a batch: `critic_members`, `value_spread`, `old_member_values`.

    Args:
        values: of each member, for each token.
    """
    count = values.shape[2]
    members = torch.tensor([member_of_prompt(r.prompt.prompt_ids, count) for r in batch.rollouts])
    return {
        "critic_members": members,
        "value_spread": ensemble_spread(values),
        "old_member_values": values[torch.arange(len(members)), :, members],
    }
