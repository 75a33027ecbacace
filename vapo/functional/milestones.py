"""Values without a network: the rewards of other responses that came to the same state."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vapo.functional.baselines import mean_of_others
from vapo.functional.masking import zero_outside


@torch.no_grad()
def milestone_values(
    rewards: Float[Tensor, " B"],
    milestones: Int[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    group_size: int,
    shrinkage: float | int,
) -> tuple[Float[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Value each state by the rewards of the group's other responses that reach the same state.

        V(s_t) = (sum_j r_j + shrinkage * m) / (n + shrinkage)     m where n = 0

    `milestones` numbers the states from 0 on: within a group, equal numbers count as the same
    state. j are the n other responses of the group that have the number of s_t on any token. m is
    the mean reward of all G - 1 others. The value depends neither on the response's own reward nor
    on the response after s_t. So as a baseline it leaves the policy's gradient unbiased.

    Source: ours, after Numca (arXiv 2605.29782), of which only the abstract was read.
    Units: those of the reward. Groups are contiguous.
    Padding: its milestones may be any; 0 in both results.
    Returns: the values, and n.
    Raises: ValueError when group_size < 2 or it does not divide the number of responses.

    >>> r, states = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([[0, 1], [0, 1], [0, 2]])
    >>> mask = torch.ones(3, 2, dtype=torch.bool)
    >>> milestone_values(r, states, mask, group_size=3, shrinkage=1)[0]
    tensor([[0.0000, 0.0000],
            [0.5000, 0.7500],
            [0.5000, 0.5000]])
    """
    r = rewards.double()
    means = mean_of_others(r, group_size=group_size)[:, None]
    is_other = 1 - torch.eye(group_size, dtype=r.dtype, device=r.device)
    sums, counts = [], []
    columns = (r[:, None], milestones, response_mask.to(r.dtype))
    for group_rewards, states, is_token in zip(
        *(x.split(group_size) for x in columns), strict=True
    ):
        reached = r.new_zeros(group_size, int(states.max()) + 1)
        reached.scatter_reduce_(1, states, is_token, "amax")
        sums.append((is_other @ (reached * group_rewards)).gather(1, states))
        counts.append((is_other @ reached).gather(1, states))
    total, count = torch.cat(sums), torch.cat(counts)
    values = torch.where(
        count > 0, (total + shrinkage * means) / (count + shrinkage).clamp(min=1e-9), means
    )
    values, count = zero_outside(values, response_mask), zero_outside(count, response_mask)
    return values.to(torch.promote_types(rewards.dtype, torch.float32)), count.long()
