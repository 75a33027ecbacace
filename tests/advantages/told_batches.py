"""Pairs of responses behind two prompts, without and with the answer, on one process or on two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tests.advantages.two_ranks import batch_of
from tests.systems import estimated, system_config
from tests.tiny_model import tiny_model
from vapo.config.hyperparameters import resolve
from vapo.diagnostics.iteration_metrics import iteration_metrics
from vapo.networks.actor_critic import Actor
from vapo.networks.forward_passes import ForwardNetworks, add_logprobs_and_values
from vapo.networks.token_inputs import Layout
from vapo.system.distributed import gather_over_ranks
from vapo.types import RolloutBatch

PAIRS = "components.group_sampling.group_size=2"
TEMPERATURE = 0.7


def told_batch() -> RolloutBatch:
    """Pairs; the answer is a token before the prompt, of two lengths."""
    config = system_config("oppo", PAIRS)
    batch = batch_of(config, [True, False, True, True], [[0.0] * n for n in (3, 1, 2, 4)])
    rollouts = []
    for i, rollout in enumerate(batch.rollouts):
        answer = (9, 10) if i < 2 else (11,)
        own = (*answer, *rollout.prompt.prompt_ids)
        prompt = replace(rollout.prompt, critic_prompt_ids=own)
        ids = tuple(5 + (i + t) % 4 for t in range(len(rollout.response_ids)))
        rollouts.append(replace(rollout, prompt=prompt, response_ids=ids))
    names = RolloutBatch.__dataclass_fields__
    plain = {name: value for name, value in vars(batch).items() if name in names}
    return RolloutBatch(**{**plain, "rollouts": rollouts})


def networks(actor: Actor, layout: Layout = "padded", *, extra: bool = True) -> ForwardNetworks:
    return ForwardNetworks(
        actor=actor,
        reference=None,
        critic=None,
        temperature=TEMPERATURE,
        max_tokens=12,
        pad_id=0,
        layout=layout,
        device=torch.device("cpu"),
        wants_collisions=extra,
        wants_answers=extra,
    )


def told(system: str, rank: int, world_size: int) -> dict[str, Any]:
    """The advantages and the metrics of all pairs, of which each process has its share."""
    whole = told_batch()
    share = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    parts: dict[str, Any] = {
        name: value[share] if isinstance(value, (list, torch.Tensor)) else value
        for name, value in vars(whole).items()
    }
    config = system_config(system, PAIRS)
    batch = add_logprobs_and_values(RolloutBatch(**parts), networks(Actor(tiny_model())))
    if system == "otb":  # which is told no answer
        batch = replace(batch, answer_logprobs=None)
    made = estimated(config, batch)
    assert made.advantages is not None
    metrics = iteration_metrics(made, resolve(config))
    return {"advantages": gather_over_ranks(made.advantages), "metrics": metrics}


def told_on_a_rank(system: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    found = told(system, dist.get_rank(), 2)
    dist.barrier()
    dist.destroy_process_group()
    return found
