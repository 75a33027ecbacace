"""Forward passes over a rollout batch: old and reference log-probs, entropies, old values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vapo.networks.actor import Actor, FrozenBase
from vapo.networks.critic import Critic
from vapo.networks.token_inputs import cut_by_tokens, rollout_inputs, sequence_lengths
from vapo.types import EvaluatedBatch, RolloutBatch


@dataclass(frozen=True)
class ForwardNetworks:
    """The networks whose forward passes a batch needs, and their settings; None: not needed."""

    actor: Actor | None
    reference: Actor | FrozenBase | None
    critic: Critic | None
    temperature: float
    max_tokens: int
    pad_id: int
    packed: bool
    device: torch.device


@torch.no_grad()
def evaluate_rollouts(
    batch: RolloutBatch, networks: ForwardNetworks, *, with_entropy: bool = False
) -> EvaluatedBatch:
    """Compute a batch's old and reference log-probs and old values, of each network given.

    The engine's log-probs differ from these by its own rounding. Entropies come with the old
    log-probs; they are kept `with_entropy`. Every rank must call this.
    """
    networks_of: dict[str, Actor | FrozenBase | Critic | None] = {
        "old_logprobs": networks.actor,
        "ref_logprobs": networks.reference,
        "old_values": networks.critic,
        "old_entropy": networks.actor if with_entropy else None,
    }
    columns: dict[str, Any] = {
        name: torch.zeros(batch.response_mask.shape)
        for name, network in networks_of.items()
        if network is not None
    }
    packed = networks.packed
    lengths, max_tokens = sequence_lengths(batch), networks.max_tokens
    for rows in cut_by_tokens(lengths, range(len(batch)), max_tokens=max_tokens, packed=packed):
        inputs = rollout_inputs(batch, rows, pad_id=networks.pad_id, packed=packed)
        inputs = inputs.to(networks.device)
        found: dict[str, Tensor] = {}
        if networks.actor is not None:
            found["old_logprobs"], found["old_entropy"] = networks.actor(
                inputs, temperature=networks.temperature
            )
        if networks.reference is not None:
            found["ref_logprobs"], _ = networks.reference(inputs, temperature=networks.temperature)
        if networks.critic is not None:
            found["old_values"] = networks.critic(inputs).values
        for name in columns:
            columns[name][rows, : inputs.response_mask.shape[1]] = inputs.scatter(found[name]).cpu()
    return EvaluatedBatch(**vars(batch), **columns)
