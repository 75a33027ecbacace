"""Forward passes over a rollout batch, before the update.

The rows are cut into chunks by a budget of tokens. The passes compute old and reference log-probs,
entropies and old values.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vapo.networks.actor_critic import Actor, Critic, FrozenBase, ensemble_columns, members_of
from vapo.networks.token_inputs import (
    Layout,
    TokenInputs,
    critic_prompt,
    has_critic_prompts,
    rollout_inputs,
)
from vapo.system.distributed import max_over_ranks, reshard
from vapo.types import EvaluatedBatch, RolloutBatch

_STATES = "actor_states"
_MEMBERS = "values of each member of an ensemble"


@dataclass(frozen=True)
class ForwardNetworks:
    """The networks whose forward passes a batch needs, and their settings.

    A network that is None has no pass. `wants_logprobs`: whether the actor's log-probs are needed,
    or only the states that a critic reads. `layers`: the actor's layers whose states the advantage
    estimator reads. `num_states`: how many last states of each response are kept besides its first;
    None: all states. `wants_collisions`: whether sums of squared probabilities are needed.
    `wants_answers`: whether another pass of the actor computes log-probs behind the prompts that
    contain the answer.
    """

    actor: Actor | None
    reference: Actor | FrozenBase | None
    critic: Critic | None
    temperature: float
    max_tokens: int
    pad_id: int
    layout: Layout
    device: torch.device
    wants_logprobs: bool = True
    layers: tuple[int, ...] = ()
    num_states: int | None = None
    wants_collisions: bool = False
    wants_answers: bool = False


@torch.no_grad()
def add_logprobs_and_values(
    batch: RolloutBatch, networks: ForwardNetworks, *, with_entropy: bool = False
) -> EvaluatedBatch:
    """Return the batch with the old log-probs, reference log-probs and old values of all rows.

    A network that is None adds no column. `with_entropy` adds the entropies of the old policy. The
    engine's log-probs in the batch differ from these by its own rounding. Every rank must call
    this.
    """
    layers = networks.layers or (() if networks.critic is None else networks.critic.layers)
    reads_states = batch.actor_states is None and bool(layers)

    def policy_columns(inputs: TokenInputs) -> dict[str, Tensor]:
        columns_by_name: dict[str, Tensor] = {}
        if networks.actor is not None and (networks.wants_logprobs or reads_states):
            output = networks.actor(
                inputs,
                temperature=temperature if networks.wants_logprobs else None,
                layers=layers if reads_states else (),
                wants_entropy=with_entropy,
                wants_collisions=networks.wants_collisions,
            )
            outputs = {"old_logprobs": output.logprobs, _STATES: output.states}
            outputs["old_collisions"] = output.collisions
            outputs |= {"old_entropy": output.entropy} if with_entropy else {}
            columns_by_name = {
                name: column for name, column in outputs.items() if column is not None
            }
        if networks.reference is not None:
            output = networks.reference(inputs, temperature=temperature, wants_entropy=False)
            columns_by_name["ref_logprobs"] = output.logprobs
        return columns_by_name

    def critic_columns(inputs: TokenInputs) -> dict[str, Tensor]:
        if networks.critic is None:
            return {}
        output = networks.critic(inputs)
        member_values = {} if output.members is None else {_MEMBERS: output.members}
        return {"old_values": output.values, **member_values}

    def answer_columns(inputs: TokenInputs) -> dict[str, Tensor]:
        assert networks.actor is not None
        output = networks.actor(inputs, temperature=temperature, wants_entropy=False)
        return {"answer_logprobs": output.logprobs}

    def all_columns(inputs: TokenInputs) -> dict[str, Tensor]:
        return policy_columns(inputs) | critic_columns(inputs)

    columns: dict[str, Any] = {}
    temperature = networks.temperature
    if not layers and (networks.critic is None or not has_critic_prompts(batch)):
        _run_in_chunks(columns, batch, networks, all_columns, for_critic=False)
    else:
        if networks.actor is not None or networks.reference is not None:
            _run_in_chunks(columns, batch, networks, policy_columns, for_critic=False)
        states = columns.pop(_STATES, batch.actor_states)
        if networks.critic is not None:
            critic_batch = replace(batch, actor_states=states if networks.critic.layers else None)
            _run_in_chunks(columns, critic_batch, networks, critic_columns, for_critic=True)
        batch = replace(batch, actor_states=states)
    if networks.wants_answers:
        _run_in_chunks(columns, batch, networks, answer_columns, for_critic=True)
    for network in (networks.actor, networks.reference, *members_of(networks.critic)):
        if network is not None:  # otherwise its root parameters stay gathered in the updates
            reshard(network)
            reshard(getattr(network, "actor", network))  # a reference or adapters contain the actor
    if _MEMBERS in columns:
        columns |= ensemble_columns(batch, columns.pop(_MEMBERS))
    return EvaluatedBatch(**vars(batch), **columns)


def _run_in_chunks(
    columns: dict[str, Any],
    batch: RolloutBatch,
    networks: ForwardNetworks,
    forward: Callable[[TokenInputs], dict[str, Tensor]],
    *,
    for_critic: bool,
) -> None:
    """Run `forward` over all rows of the batch, chunk by chunk, and put its results into `columns`.

    Args:
        columns: the results by name, [B, T] or for the actor's states a tensor for each row.
        forward: returns by name what it computes for the response tokens of a chunk, flattened.
        for_critic: whether the critic's prompts are read in place of the policy's.
    """
    options: dict[str, Any] = {"layout": networks.layout, "for_critic": for_critic}
    chunks = cut_rollouts(batch, range(len(batch)), max_tokens=networks.max_tokens, **options)
    # results are fetched after the last pass, since a GPU computes while the host goes on
    padded_parts: list[tuple[list[int], int, str, Tensor]] = []
    for rows in chunks:
        inputs = rollout_inputs(batch, rows, pad_id=networks.pad_id, **options)
        inputs = inputs.to(networks.device)
        width = inputs.response_mask.shape[1]
        for name, flat in forward(inputs).items():
            if name == _STATES:  # kept without padding: this is the largest column
                parts = flat.cpu().split(inputs.response_mask.sum(dim=1).tolist())
                part_rows = columns.setdefault(name, [None] * len(batch))
                for row, part in zip(rows, parts, strict=True):
                    if networks.num_states is not None:
                        part = torch.cat([part[:1], part[-networks.num_states :]])
                    part_rows[row] = part
                continue
            padded_parts.append((rows, width, name, inputs.scatter(flat)))
    for rows, width, name, part_rows in padded_parts:
        if name not in columns:
            columns[name] = torch.zeros(*batch.response_mask.shape, *part_rows.shape[2:])
        columns[name][rows, :width] = part_rows.cpu()


def cut_rollouts(
    batch: RolloutBatch,
    rows: Sequence[int],
    *,
    max_tokens: int,
    layout: Layout,
    for_critic: bool = False,
) -> list[list[int]]:
    """Cut rows of a rollout batch into chunks of at most `max_tokens` tokens (`cut_by_tokens`).

    `for_critic`: whether the critic's prompts are counted in place of the policy's. The result has
    the row numbers of each chunk.
    """
    rollouts = batch.rollouts
    prompts = [critic_prompt(r.prompt) if for_critic else r.prompt.prompt_ids for r in rollouts]
    lengths = [len(p) + len(r.response_ids) for p, r in zip(prompts, rollouts, strict=True)]
    return cut_by_tokens(lengths, rows, max_tokens=max_tokens, layout=layout, prompts=prompts)


def cut_by_tokens(
    lengths: Sequence[int],
    rows: Sequence[int],
    *,
    max_tokens: int,
    layout: Layout = "padded",
    prompts: Sequence[tuple[int, ...]] | None = None,
) -> list[list[int]]:
    """Cut rows into chunks of at most `max_tokens` tokens, and return each chunk's row numbers.

    `lengths[row]` is the row's prompt + response length. A row longer than the budget gets its own
    chunk. All ranks get equally many chunks, since every forward of a sharded network is a
    collective. Each rank's largest chunks come first, so that ranks wait little for each other.
    In the padded layout padding counts, and rows of similar length go together. Packed chunks are
    about equally large. Where prompts are shared, rows with the same prompt go together, and a
    chunk counts the prompt once.

    Args:
        prompts: the prompt of each row, needed where prompts are shared.
    """
    load = _Load(lengths, rows, prompts if layout == "shared_prompts" else None)
    if layout == "padded":
        chunks = _padded_chunks(lengths, rows, max_tokens)
    elif load.repeats_prompts:
        chunks = _grouped_chunks(load, rows, max_tokens)
    else:
        chunks = _packed_chunks(lengths, rows, max_tokens)
    num_chunks = int(max_over_ranks(torch.tensor(len(chunks))))
    while len(chunks) < num_chunks:
        largest = max((c for c in chunks if len(c) > 1), key=load)
        chunks.remove(largest)
        half = len(largest) // 2
        is_dealt = layout == "packed"
        chunks += [largest[::2], largest[1::2]] if is_dealt else [largest[:half], largest[half:]]
    return sorted(chunks, key=load, reverse=True)


class _Load:
    """Counts the tokens of a chunk of rows, and a prompt that several of them share only once.

    If `prompts` is None, no prompt is shared, so the rows' lengths are added up.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        rows: Sequence[int],
        prompts: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self.lengths = lengths
        numbers: dict[object, int] = {}  # prompts are compared once here, and their numbers later
        self.group = {
            row: numbers.setdefault(row if prompts is None else prompts[row], len(numbers))
            for row in rows
        }
        self.prompt_length = {row: 0 if prompts is None else len(prompts[row]) for row in rows}
        self.repeats_prompts = len(numbers) < len(rows)

    def __call__(self, chunk: Sequence[int]) -> int:
        once = {self.group[row]: self.prompt_length[row] for row in chunk}
        responses = sum(self.lengths[row] - self.prompt_length[row] for row in chunk)
        return responses + sum(once.values())


def _padded_chunks(lengths: Sequence[int], rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    chunks: list[list[int]] = []
    for row in sorted(rows, key=lambda row: lengths[row], reverse=True):
        width = lengths[chunks[-1][0]] if chunks else 0
        if chunks and width * (len(chunks[-1]) + 1) <= max_tokens:
            chunks[-1].append(row)
        else:
            chunks.append([row])
    return chunks


def _packed_chunks(lengths: Sequence[int], rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut rows into about equally large chunks of at most `max_tokens` tokens.

    The longest rows come first, and each goes to the emptiest chunk. A row that is longer than
    `max_tokens` is a chunk by itself.
    """
    longest_first = sorted(rows, key=lambda row: lengths[row], reverse=True)
    num_chunks = max(1, -(-sum(lengths[row] for row in rows) // max_tokens))
    while True:
        chunks: list[list[int]] = [[] for _ in range(num_chunks)]
        loads = [(0, index) for index in range(num_chunks)]
        for row in longest_first:
            load, index = heapq.heappop(loads)
            chunks[index].append(row)
            heapq.heappush(loads, (load + lengths[row], index))
        if all(len(chunks[i]) < 2 or load <= max_tokens for load, i in loads):
            return [chunk for chunk in chunks if chunk]
        num_chunks += 1


def _grouped_chunks(load: _Load, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut rows into few chunks of about equally many tokens, with a prompt's rows side by side.

    A prompt whose rows lie in two chunks is computed in both. So its rows are split only if
    together they are above `max_tokens`, or if there would be more chunks otherwise.
    """
    neighbours = sorted(rows, key=load.group.__getitem__)
    row_parts = [[row] for row in neighbours]
    grouped = [list(group) for _, group in itertools.groupby(neighbours, load.group.__getitem__)]
    group_parts = [
        part
        for group in grouped
        for part in ([group] if load(group) <= max_tokens else [[row] for row in group])
    ]
    num_chunks = len(_join_parts(load, row_parts, max_tokens))
    parts = (
        row_parts if len(_join_parts(load, group_parts, max_tokens)) > num_chunks else group_parts
    )
    limit = bisect.bisect_left(
        range(max_tokens),
        True,
        key=lambda limit: len(_join_parts(load, parts, limit)) <= num_chunks,
    )
    return _join_parts(load, parts, limit)


def _join_parts(load: _Load, parts: Sequence[list[int]], limit: int) -> list[list[int]]:
    """Join lists of rows into chunks, in order, each within `limit` tokens where possible."""
    chunks: list[list[int]] = []
    total = 0
    for part in parts:
        part_load = load(part)
        added_load = part_load
        if chunks and load.group[part[0]] == load.group[chunks[-1][-1]]:
            added_load -= load.prompt_length[part[0]]
        if chunks and total + added_load <= limit:
            chunks[-1] += part
            total += added_load
        else:
            chunks.append(list(part))
            total = part_load
    return chunks
