"""The gradients of a minibatch whose rollouts answer few prompts, several each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.invariance.gradients import (
    NUM_ROLLOUTS,
    FixedRollouts,
    RecordsGradients,
    config_on,
    fitted,
)
from tests.rollout_fixtures import make_episodes, make_rollouts
from vapo.environments.contract import Verdict
from vapo.types import Rollout

GROUPS = (5, 2, 1, 4, 1, 3)  # responses of each prompt, so that ranks have unequal ones


class Grouped(FixedRollouts):
    """Made-up responses to prompts that several of them share."""

    episodes = False
    has_critic_prompts = False

    def made_up(self) -> tuple[list[Rollout], list[Verdict]]:
        make = make_episodes if self.episodes else make_rollouts
        rollouts, verdicts = make(NUM_ROLLOUTS, vocab_size=30)
        assert sum(GROUPS) == NUM_ROLLOUTS
        firsts = [i for i, size in enumerate(GROUPS) for _ in range(size)]
        prompts = [rollouts[i].prompt for i in range(len(GROUPS))]
        if self.has_critic_prompts:  # two prompts of the policy are one to the critic
            texts = [(7, 8, 9), (7, 8, 9), (5,), (6, 2, 3, 4, 5, 6, 7, 8, 9), (4, 4), (5, 5)]
            prompts = [
                replace(prompt, critic_prompt_ids=ids)
                for prompt, ids in zip(prompts, texts, strict=True)
            ]
        chosen = [replace(r, prompt=prompts[i]) for r, i in zip(rollouts, firsts, strict=True)]
        return chosen, verdicts


class GroupedEpisodes(Grouped):
    episodes = True


class GroupedWithCriticPrompts(Grouped):
    has_critic_prompts = True


KINDS = {
    "responses": Grouped,
    "episodes": GroupedEpisodes,
    "critic prompts": GroupedWithCriticPrompts,
}


def compute(
    num_processes: int, microbatch_tokens: int, kind: str, *overrides: str
) -> dict[str, Any]:
    """Gradients by parameter name, the metrics that were logged, and the counted operations."""
    config = config_on(num_processes, microbatch_tokens, *overrides)
    module = RecordsGradients(config, pad_id=0)
    return fitted(module, KINDS[kind](config), config) | {"flops": module.update_flops}
