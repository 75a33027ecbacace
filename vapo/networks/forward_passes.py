"""What the networks say of a rollout batch: old and reference log-probs, entropies, old values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vapo.networks.actor import Actor, FrozenBase
from vapo.networks.critic import Critic
from vapo.networks.token_inputs import cut_by_tokens, rollout_inputs, sequence_lengths
from vapo.types import RolloutBatch


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
def read_rollouts(batch: RolloutBatch, readers: Readers) -> None:
    """Fill `old_logprobs`, `ref_logprobs` and `old_values`, each if its network is asked.

    The engine's log-probs differ from these by its own rounding. Entropies come with the old
    log-probs; they are kept if `old_entropy` is there for them. Every rank must call this.
    """
    shape = batch.response_mask.shape
    if readers.actor is not None:
        batch.old_logprobs = torch.zeros(shape)
    if readers.reference is not None:
        batch.ref_logprobs = torch.zeros(shape)
    if readers.critic is not None:
        batch.old_values = torch.zeros(shape)
    chunks = cut_by_tokens(
        sequence_lengths(batch),
        range(len(batch)),
        max_tokens=readers.max_tokens,
        packed=readers.packed,
    )
    for rows in chunks:
        _read_rows(batch, rows, readers)


def _read_rows(batch: RolloutBatch, rows: list[int], readers: Readers) -> None:
    inputs = rollout_inputs(batch, rows, pad_id=readers.pad_id, packed=readers.packed)
    inputs = inputs.to(readers.device)
    width = inputs.response_mask.shape[1]
    if readers.actor is not None and batch.old_logprobs is not None:
        logprobs, entropy = readers.actor(inputs, temperature=readers.temperature)
        batch.old_logprobs[rows, :width] = inputs.scatter(logprobs).cpu()
        if batch.old_entropy is not None:
            batch.old_entropy[rows, :width] = inputs.scatter(entropy).cpu()
    if readers.reference is not None and batch.ref_logprobs is not None:
        logprobs, _ = readers.reference(inputs, temperature=readers.temperature)
        batch.ref_logprobs[rows, :width] = inputs.scatter(logprobs).cpu()
    if readers.critic is not None and batch.old_values is not None:
        batch.old_values[rows, :width] = inputs.scatter(readers.critic(inputs)).cpu()
