"""Forward passes over a rollout batch: old and reference log-probs, entropies, old values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vapo.networks.actor import Actor, FrozenBase
from vapo.networks.critic import Critic
from vapo.networks.ensemble import ensemble_columns, members_of
from vapo.networks.token_cuts import cut_rollouts
from vapo.networks.token_inputs import Layout, TokenInputs, has_critic_prompts, rollout_inputs
from vapo.system.sharding import reshard
from vapo.types import EvaluatedBatch, RolloutBatch

_MEMBERS = "values of each member of an ensemble"


@dataclass(frozen=True)
class ForwardNetworks:
    """The networks whose forward passes a batch needs, and their settings; None: not needed."""

    actor: Actor | None
    reference: Actor | FrozenBase | None
    critic: Critic | None
    temperature: float
    max_tokens: int
    pad_id: int
    layout: Layout
    device: torch.device


@torch.no_grad()
def evaluate_rollouts(
    batch: RolloutBatch, networks: ForwardNetworks, *, with_entropy: bool = False
) -> EvaluatedBatch:
    """Compute a batch's old and reference log-probs and old values, of each network given.

    The engine's log-probs differ from these by its own rounding. Entropies come with the old
    log-probs; they are kept `with_entropy`. Every rank must call this.
    """
    of_policy = {
        "old_logprobs": networks.actor,
        "ref_logprobs": networks.reference,
        "old_entropy": networks.actor if with_entropy else None,
    }
    names = [name for name, network in of_policy.items() if network is not None]
    has_own = networks.critic is not None and has_critic_prompts(batch)
    columns: dict[str, Any] = {name: torch.zeros(batch.response_mask.shape) for name in names}
    if networks.critic is not None:
        columns["old_values"] = torch.zeros(batch.response_mask.shape)
        if (count := len(members_of(networks.critic))) > 1:
            columns[_MEMBERS] = torch.zeros(*batch.response_mask.shape, count)

    def values(inputs: TokenInputs) -> dict[str, Tensor]:
        return _values(inputs, networks.critic)

    def both(inputs: TokenInputs) -> dict[str, Tensor]:
        found = _logprobs(inputs, networks)
        return found if has_own else found | values(inputs)

    if names or not has_own:
        _fill(columns, batch, networks, both, for_critic=False)
    if has_own:
        _fill(columns, batch, networks, values, for_critic=True)
    for network in (networks.actor, networks.reference, *members_of(networks.critic)):
        if network is not None:  # else its root stays whole beside the updates that come next
            reshard(network.actor if isinstance(network, FrozenBase) else network)
    if _MEMBERS in columns:
        columns |= ensemble_columns(batch, columns.pop(_MEMBERS))
    return EvaluatedBatch(**vars(batch), **columns)


def _values(inputs: TokenInputs, critic: Critic | None) -> dict[str, Tensor]:
    if critic is None:
        return {}
    output = critic(inputs)
    of_members = {} if output.members is None else {_MEMBERS: output.members}
    return {"old_values": output.values, **of_members}


def _logprobs(inputs: TokenInputs, networks: ForwardNetworks) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if networks.actor is not None:
        found["old_logprobs"], found["old_entropy"] = networks.actor(
            inputs, temperature=networks.temperature
        )
    if networks.reference is not None:
        found["ref_logprobs"], _ = networks.reference(inputs, temperature=networks.temperature)
    return found


def _fill(
    columns: dict[str, Tensor],
    batch: RolloutBatch,
    networks: ForwardNetworks,
    forward: Callable[[TokenInputs], dict[str, Tensor]],
    *,
    for_critic: bool,
) -> None:
    """Run forward passes over all rows, cut by their lengths, and put what they find in place."""
    options: dict[str, Any] = {"layout": networks.layout, "for_critic": for_critic}
    chunks = cut_rollouts(batch, range(len(batch)), max_tokens=networks.max_tokens, **options)
    for rows in chunks:
        inputs = rollout_inputs(batch, rows, pad_id=networks.pad_id, **options)
        inputs = inputs.to(networks.device)
        width = inputs.response_mask.shape[1]
        for name, found in forward(inputs).items():
            if name in columns:
                columns[name][rows, :width] = inputs.scatter(found).cpu()
