"""What the networks say of a rollout batch: old and reference log-probs, entropies, old values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.networks.actor import Actor, FrozenBase
from vapo.networks.critic import Critic
from vapo.networks.token_inputs import TokenInputs, cut_by_tokens, rollout_inputs, sequence_lengths
from vapo.types import EvaluatedBatch, RolloutBatch


@dataclass(frozen=True)
class Readers:
    """The networks that read a batch, and how; None: not asked."""

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
    batch: RolloutBatch, readers: Readers, *, with_entropy: bool = False
) -> EvaluatedBatch:
    """The batch with old and reference log-probs and old values, each if its network is asked.

    The engine's log-probs differ from these by its own rounding. Entropies come with the old
    log-probs; they are kept `with_entropy`. Every rank must call this.
    """
    networks: dict[str, Actor | FrozenBase | Critic | None] = {
        "old_logprobs": readers.actor,
        "ref_logprobs": readers.reference,
        "old_values": readers.critic,
        "old_entropy": readers.actor if with_entropy else None,
    }
    columns: dict[str, Any] = {
        name: torch.zeros(batch.response_mask.shape)
        for name, network in networks.items()
        if network is not None
    }
    chunks = cut_by_tokens(
        sequence_lengths(batch),
        range(len(batch)),
        max_tokens=readers.max_tokens,
        packed=readers.packed,
    )
    for rows in chunks:
        inputs = rollout_inputs(batch, rows, pad_id=readers.pad_id, packed=readers.packed)
        inputs = inputs.to(readers.device)
        width = inputs.response_mask.shape[1]
        for name, tokens in _forward(inputs, readers).items():
            if name in columns:
                columns[name][rows, :width] = inputs.scatter(tokens).cpu()
    return EvaluatedBatch(**vars(batch), **columns)


def _forward(inputs: TokenInputs, readers: Readers) -> dict[str, Float[Tensor, " n"]]:
    """What each network that is asked says of the response tokens."""
    found: dict[str, Tensor] = {}
    if readers.actor is not None:
        found["old_logprobs"], found["old_entropy"] = readers.actor(
            inputs, temperature=readers.temperature
        )
    if readers.reference is not None:
        found["ref_logprobs"], _ = readers.reference(inputs, temperature=readers.temperature)
    if readers.critic is not None:
        found["old_values"] = readers.critic(inputs)
    return found
