"""The gradients of a minibatch of episodes: ours, and those of a construction written out here.

`by_hand` reads no code of ours behind the config: each sequence goes through the Hugging Face
model alone, numbers are gathered at the sampled positions, and the losses are written out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.invariance.gradients import (
    NUM_ROLLOUTS,
    ROOT,
    FixedRollouts,
    RecordsGradients,
    config_on,
    fitted,
)
from tests.rollout_fixtures import make_episodes
from vapo.environments.contract import Verdict
from vapo.types import FinishReason, Rollout

ALPHA, MU, EPS_LOW, EPS_HIGH = 2.0, 0.1, 0.2, 0.28  # of conf/state_tracking
ACTOR, CRITIC = "models/state_tracking/policy", "models/state_tracking/reward_model"


class Episodes(FixedRollouts):
    def made_up(self) -> tuple[list[Rollout], list[Verdict]]:
        return make_episodes(NUM_ROLLOUTS, vocab_size=30)


def compute(num_processes: int, microbatch_tokens: int, *overrides: str) -> dict[str, Any]:
    """Gradients by parameter name, and the metrics that were logged."""
    config = config_on(num_processes, microbatch_tokens, *overrides)
    return fitted(RecordsGradients(config, pad_id=0), Episodes(config), config)


def by_hand(
    *, over_turns: bool = False, filters: bool = False, of_responses: bool = False
) -> dict[str, Tensor]:
    """The gradients of the policy's and the critic's losses, sequence by sequence.

    Args:
        over_turns: a turn is one step of GAE.
        filters: truncated episodes carry no loss.
        of_responses: the policy's loss is GSPO's.
    """
    actor = AutoModelForCausalLM.from_pretrained(ROOT / ACTOR, dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(ROOT / CRITIC, dtype=torch.float32)
    rollouts, verdicts = make_episodes(NUM_ROLLOUTS, vocab_size=30)
    logprobs, old, values, advantages, targets = [], [], [], [], []
    for rollout in rollouts:
        ids = torch.tensor([*rollout.prompt.prompt_ids, *rollout.response_ids])
        turns = sampled_places(rollout)
        places = torch.tensor([place for turn in turns for place in turn])
        chances = actor(ids[None]).logits[0].log_softmax(dim=-1)
        logprobs.append(chances[places - 1, ids[places]])
        states = critic.model(ids[None]).last_hidden_state[0]
        value = critic.score(states[places - 1])[:, 0]
        mu = torch.tensor(rollout.rollout_logprobs)[places - len(rollout.prompt.prompt_ids)]
        old.append(logprobs[-1].detach() + (mu + 0.5))
        rewards = [turn.reward for turn in rollout.turns]
        found = credit(rewards, [len(turn) for turn in turns], value.tolist(), over_turns)
        advantages.append(found[0])
        targets.append(found[1])
        values.append(value)
    every = torch.tensor([x for row in advantages for x in row], dtype=torch.float64)
    mean, deviation = every.mean(), (every.var(correction=0) + 1e-8).sqrt()
    policy, likelihood, value_errors = [], [], []
    for i, rollout in enumerate(rollouts):
        if filters and rollout.finish_reason is not FinishReason.STOP:
            continue
        white = ((torch.tensor(advantages[i], dtype=torch.float64) - mean) / deviation).float()
        if of_responses:
            s = (logprobs[i] - old[i]).mean().exp().detach()
            is_kept = torch.where(white > 0, s <= 1 + 4e-4, s >= 1 - 3e-4)
            policy.append(-(s * white * logprobs[i] * is_kept).mean()[None])
        else:
            ratio = (logprobs[i] - old[i]).exp()
            bounded = ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH)
            policy.append(-torch.minimum(ratio * white, bounded * white))
        if verdicts[i].is_correct:
            likelihood.append(-logprobs[i])
        counted = torch.tensor([target is not None for target in targets[i]])
        goals = torch.tensor([target for target in targets[i] if target is not None])
        value_errors.append(0.5 * (values[i][counted] - goals).square())
    (torch.cat(policy).mean() + MU * torch.cat(likelihood).mean()).backward()
    torch.cat(value_errors).mean().backward()
    named = [("actor", actor), ("critic", critic)]
    return {
        f"{network}.model.{name}": parameter.grad
        for network, model in named
        for name, parameter in model.named_parameters()
    }


def sampled_places(rollout: Rollout) -> list[list[int]]:
    """Of each turn, where its sampled tokens are in the whole sequence."""
    place, found = len(rollout.prompt.prompt_ids), []
    for turn in rollout.turns:
        place += turn.num_observed
        found.append(list(range(place, place + turn.num_sampled)))
        place += turn.num_sampled
    return found


def credit(
    rewards: list[float], sizes: list[int], values: list[float], over_turns: bool
) -> tuple[list[float], list[float | None]]:
    """Advantages and value targets of an episode's sampled tokens; None: no value target."""
    firsts = [sum(sizes[:k]) for k in range(len(sizes))]
    if over_turns:
        steps, earned = [values[first] for first in firsts], rewards
    else:
        steps, earned = values, [0.0] * len(values)
        for first, size, reward in zip(firsts, sizes, rewards, strict=True):
            earned[first + size - 1] = reward
    lambda_ = max(0.0, 1 - 1 / (ALPHA * len(steps)))
    advantages, after, ahead = [0.0] * len(steps), 0.0, 0.0
    for t in reversed(range(len(steps))):
        advantages[t] = after = earned[t] + ahead - steps[t] + lambda_ * after
        ahead = steps[t]
    returns = [sum(earned[t:]) for t in range(len(steps))]
    if not over_turns:
        return advantages, list(returns)
    of_tokens: list[float | None] = [None] * len(values)
    for first, target in zip(firsts, returns, strict=True):
        of_tokens[first] = target
    return [a for a, size in zip(advantages, sizes, strict=True) for _ in range(size)], of_tokens
