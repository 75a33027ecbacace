"""Baselines and values of single tokens, from the policy's log-probs and without a network.

OTB weighs the group's returns by the gradients that each response has gathered so far; OPPO counts
how much likelier the answer makes each token. Nothing here is differentiated.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vapo.functional.advantages import monte_carlo_returns
from vapo.functional.baselines import mean_of_others
from vapo.functional.masking import compact, compaction_index, scatter_back, zero_outside


@torch.no_grad()
def optimal_token_advantages(
    token_rewards: Float[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    collisions: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    group_size: int,
    gamma: float | int,
    alone: Literal["others_mean", "zero"],
) -> Float[Tensor, "B T"]:
    """Return each token's advantage against its group's returns, weighted by squared gradients.

        w_t = 1 - 2 pi_t + sum_v pi(v)^2        pi_t the probability of the sampled token
        W_t = w_1 + ... + w_t
        B_t = sum_i G_it W_it / sum_i W_it      over the responses i that have a t-th token
        A_t = G_t - B_t

    G_t is the return from token t on. w_t is the squared length of the gradient of log pi_t by the
    logits. t counts sampled tokens only, so an environment's tokens between them change nothing. If
    all W at t are 0, the responses count alike. If only one response has a t-th token, its own
    return would be no baseline. `alone` says what is used instead: the mean return of the other
    responses from their first tokens on, or 0.

    Source: OTB (arXiv 2602.07078), as in the authors' code in verl, where `alone` is 0.
    Deviation: theirs also weighs w_t by the squared ratio to the policy that sampled.
    Units: those of the reward. `collisions` are sum_v pi(v)^2. Groups are contiguous.
    Padding: masked-out entries may hold anything and come back as 0; the mask may have gaps.
    Raises: ValueError when group_size < 2 or it does not divide the number of responses.

    >>> r, p = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[0.5, 0.5], [0.25, 0.5]])
    >>> same, mask = torch.tensor([[0.5, 0.5], [0.625, 0.5]]), torch.ones(2, 2, dtype=torch.bool)
    >>> options = {"group_size": 2, "gamma": 1, "alone": "zero"}  # W: 0.5, 1 and 1.125, 1.625
    >>> optimal_token_advantages(r, p.log(), same, mask, **options)
    tensor([[ 0.6923,  0.6190],
            [-0.3077, -0.3810]])
    """
    index = compaction_index(response_mask)
    returns = monte_carlo_returns(token_rewards.double(), response_mask, gamma=gamma)
    returns = compact(returns, index)
    of_others = mean_of_others(returns[:, 0], group_size=group_size)[:, None]
    squares = 1 - 2 * logprobs.double().exp() + collisions.double()
    weights = compact(zero_outside(squares.clamp(min=0), response_mask), index).cumsum(dim=1)
    runs = torch.arange(index.shape[1], device=index.device) < response_mask.sum(dim=1)[:, None]
    # each [N, G, T]
    g, w, is_there = (x.unflatten(0, (-1, group_size)) for x in (returns, weights, runs))
    w = torch.where((w * is_there).sum(dim=1, keepdim=True) > 0, w, 1.0) * is_there
    # the least return is subtracted first, so that equal returns give exactly 0
    least = torch.where(is_there, g, torch.inf).amin(dim=1, keepdim=True).nan_to_num(posinf=0.0)
    excess = (torch.where(is_there, g - least, 0.0) * w).sum(dim=1, keepdim=True)
    baseline = least + excess / w.sum(dim=1, keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)
    is_alone = (is_there.sum(dim=1, keepdim=True) == 1).expand_as(g).flatten(0, 1)
    lone = of_others if alone == "others_mean" else torch.zeros_like(of_others)
    baselines = torch.where(is_alone, lone, baseline.expand_as(g).flatten(0, 1))
    advantages = scatter_back(zero_outside(returns - baselines, runs), index)
    return advantages.to(torch.promote_types(token_rewards.dtype, logprobs.dtype))


@torch.no_grad()
def success_values(
    is_correct: Bool[Tensor, " B"],
    answer_logprobs: Float[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    group_size: int,
    smoothing: float | int,
    max_evidence: float | int | None,
    low: float | int,
    high: float | int,
) -> Float[Tensor, "B T"]:
    """Return values of states, by how much likelier the right answer makes the tokens before them.

        p_1       = (c + smoothing) / (G - 1 + 2 smoothing)     c of the G - 1 others are right
        logit p_t = logit p_1 + sum_{j < t} (log pi(a_j | answer) - log pi(a_j))
        V(s_t)    = low + (high - low) p_t

    `answer_logprobs` are the policy's log-probs of the response behind a prompt that contains the
    answer. V(s_t) depends neither on the response's own reward nor on the response after s_t. So as
    a baseline it leaves the policy's gradient unbiased.

    Source: OPPO (arXiv 2605.21851), of which the abstract and a summary were read. The recursion
    and the ratio are from there; p_1 and the bound max_evidence on each term are ours.
    Units: those of `low` and `high`, the rewards of wrong and right responses. Log-probs in nats.
    Padding: masked-out entries may hold anything and come back as 0; the mask may have gaps.
    Raises: ValueError when group_size < 2 or it does not divide the number of responses.

    >>> right, mask = torch.tensor([True, False]), torch.ones(2, 2, dtype=torch.bool)
    >>> answer = torch.tensor([[0.6, 0.5], [0.1, 0.5]]).log()
    >>> options = {"smoothing": 1, "max_evidence": None, "low": 0, "high": 1}
    >>> success_values(right, answer, torch.full((2, 2), 0.2).log(), mask, group_size=2, **options)
    tensor([[0.3333, 0.6000],
            [0.6667, 0.5000]])
    """
    num_right_others = mean_of_others(is_correct.double(), group_size=group_size) * (group_size - 1)
    right, wrong = num_right_others + smoothing, group_size - 1 - num_right_others + smoothing
    evidence = zero_outside(answer_logprobs.double() - logprobs.double(), response_mask)
    if max_evidence is not None:
        evidence = evidence.clamp(-max_evidence, max_evidence)
    earlier_evidence = evidence.cumsum(dim=1) - evidence
    chances = torch.sigmoid((right.log() - wrong.log())[:, None] + earlier_evidence)
    values = zero_outside(low + (high - low) * chances, response_mask)
    return values.to(torch.promote_types(logprobs.dtype, torch.float32))
