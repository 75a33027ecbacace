"""Forward passes over a rollout batch: its rows cut into chunks by a budget of tokens, then old and
reference log-probs, entropies and old values of each."""

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
    """The networks whose forward passes a batch needs, and their settings; None: not needed.

    `wants_logprobs`: the actor's, of which a critic may need the states alone. `layers`: of the
    actor, those whose states the advantage estimator reads; `num_states`: of each response the one
    before its first token and so many last ones; None: all. `wants_collisions`: of the actor's
    log-probs, the sums of squared probabilities, too. `wants_answers`: the actor's log-probs behind
    the prompts with the answer, which is a pass of their own.
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
    """Compute a batch's old and reference log-probs and old values, of each network given.

    The engine's log-probs differ from these by its own rounding. Entropies come with the old
    log-probs; they are kept `with_entropy`. Every rank must call this.
    """
    layers = networks.layers or (() if networks.critic is None else networks.critic.layers)
    reads_states = batch.actor_states is None and bool(layers)

    def of_policy(inputs: TokenInputs) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if networks.actor is not None and (networks.wants_logprobs or reads_states):
            output = networks.actor(
                inputs,
                temperature=temperature if networks.wants_logprobs else None,
                layers=layers if reads_states else (),
                wants_entropy=with_entropy,
                wants_collisions=networks.wants_collisions,
            )
            named = {"old_logprobs": output.logprobs, _STATES: output.states}
            named["old_collisions"] = output.collisions
            named |= {"old_entropy": output.entropy} if with_entropy else {}
            found = {name: column for name, column in named.items() if column is not None}
        if networks.reference is not None:
            output = networks.reference(inputs, temperature=temperature, wants_entropy=False)
            found["ref_logprobs"] = output.logprobs
        return found

    def of_critic(inputs: TokenInputs) -> dict[str, Tensor]:
        if networks.critic is None:
            return {}
        output = networks.critic(inputs)
        of_members = {} if output.members is None else {_MEMBERS: output.members}
        return {"old_values": output.values, **of_members}

    def of_answer(inputs: TokenInputs) -> dict[str, Tensor]:
        assert networks.actor is not None
        output = networks.actor(inputs, temperature=temperature, wants_entropy=False)
        return {"answer_logprobs": output.logprobs}

    def of_both(inputs: TokenInputs) -> dict[str, Tensor]:
        return of_policy(inputs) | of_critic(inputs)

    columns: dict[str, Any] = {}
    temperature = networks.temperature
    if not layers and (networks.critic is None or not has_critic_prompts(batch)):
        _fill(columns, batch, networks, of_both, for_critic=False)
    else:
        if networks.actor is not None or networks.reference is not None:
            _fill(columns, batch, networks, of_policy, for_critic=False)
        states = columns.pop(_STATES, batch.actor_states)
        if networks.critic is not None:
            read = replace(batch, actor_states=states if networks.critic.layers else None)
            _fill(columns, read, networks, of_critic, for_critic=True)
        batch = replace(batch, actor_states=states)
    if networks.wants_answers:
        _fill(columns, batch, networks, of_answer, for_critic=True)
    for network in (networks.actor, networks.reference, *members_of(networks.critic)):
        if network is not None:  # else its root stays whole beside the updates that come next
            reshard(network)
            reshard(getattr(network, "actor", network))  # of which a reference, or adapters, are
    if _MEMBERS in columns:
        columns |= ensemble_columns(batch, columns.pop(_MEMBERS))
    return EvaluatedBatch(**vars(batch), **columns)


def _fill(
    columns: dict[str, Any],
    batch: RolloutBatch,
    networks: ForwardNetworks,
    forward: Callable[[TokenInputs], dict[str, Tensor]],
    *,
    for_critic: bool,
) -> None:
    """Run forward passes over all rows, cut by their lengths, and put what they find in place."""
    options: dict[str, Any] = {"layout": networks.layout, "for_critic": for_critic}
    chunks = cut_rollouts(batch, range(len(batch)), max_tokens=networks.max_tokens, **options)
    # fetched after the last forward pass, since a GPU computes while the host goes on
    computed: list[tuple[list[int], int, str, Tensor]] = []
    for rows in chunks:
        inputs = rollout_inputs(batch, rows, pad_id=networks.pad_id, **options)
        inputs = inputs.to(networks.device)
        width = inputs.response_mask.shape[1]
        for name, found in forward(inputs).items():
            if name == _STATES:  # without padding: they are the largest of all columns
                parts = found.cpu().split(inputs.response_mask.sum(dim=1).tolist())
                of_rows = columns.setdefault(name, [None] * len(batch))
                for row, part in zip(rows, parts, strict=True):
                    if networks.num_states is not None:
                        part = torch.cat([part[:1], part[-networks.num_states :]])
                    of_rows[row] = part
                continue
            computed.append((rows, width, name, inputs.scatter(found)))
    for rows, width, name, of_rows in computed:
        if name not in columns:
            columns[name] = torch.zeros(*batch.response_mask.shape, *of_rows.shape[2:])
        columns[name][rows, :width] = of_rows.cpu()


def cut_rollouts(
    batch: RolloutBatch,
    rows: Sequence[int],
    *,
    max_tokens: int,
    layout: Layout,
    for_critic: bool = False,
) -> list[list[int]]:
    """Cut rows of a rollout batch by the lengths that the network reads (`cut_by_tokens`)."""
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
    """Cut rows into chunks of at most `max_tokens` tokens: with padding, or packed without.

    `lengths[row]` is the row's prompt + response length; a row longer than the budget gets a
    chunk of its own. All ranks get equally many chunks, since every forward of a sharded network
    is a collective, and each rank's largest come first, so that ranks wait little for each other.
    Padded, rows of similar length go together; packed, the chunks are about equally large. Where
    prompts are shared, the rows of one go together, and each chunk counts it once.

    Args:
        prompts: of each row, needed where they are shared.
    """
    load = _Load(lengths, rows, prompts if layout == "shared_prompts" else None)
    if layout == "padded":
        chunks = _padded_chunks(lengths, rows, max_tokens)
    elif load.repeats_prompts:
        chunks = _grouped_chunks(load, rows, max_tokens)
    else:
        chunks = _packed_chunks(lengths, rows, max_tokens)
    wanted = int(max_over_ranks(torch.tensor(len(chunks))))
    while len(chunks) < wanted:
        largest = max((c for c in chunks if len(c) > 1), key=load)
        chunks.remove(largest)
        half = len(largest) // 2
        is_dealt = layout == "packed"
        chunks += [largest[::2], largest[1::2]] if is_dealt else [largest[:half], largest[half:]]
    return sorted(chunks, key=load, reverse=True)


class _Load:
    """The tokens of a chunk, in which each prompt counts once. Without prompts all rows differ."""

    def __init__(
        self,
        lengths: Sequence[int],
        rows: Sequence[int],
        prompts: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self.lengths = lengths
        numbers: dict[object, int] = {}  # a prompt is compared once, its number often
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
    """The fewest chunks into which "longest row first, into the emptiest chunk" fits."""
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
    """The fewest chunks of neighbours, the rows of a prompt being neighbours, and the most even.

    A prompt whose rows lie in two chunks is computed in both, so that happens only where chunks
    would be more without it.
    """
    neighbours = sorted(rows, key=load.group.__getitem__)
    single = [[row] for row in neighbours]
    grouped = [list(group) for _, group in itertools.groupby(neighbours, load.group.__getitem__)]
    whole = [
        part
        for group in grouped
        for part in ([group] if load(group) <= max_tokens else [[row] for row in group])
    ]
    num_chunks = len(_filled(load, single, max_tokens))
    parts = single if len(_filled(load, whole, max_tokens)) > num_chunks else whole
    limit = bisect.bisect_left(
        range(max_tokens),
        True,
        key=lambda limit: len(_filled(load, parts, limit)) <= num_chunks,
    )
    return _filled(load, parts, limit)


def _filled(load: _Load, parts: Sequence[list[int]], limit: int) -> list[list[int]]:
    """Parts in their order, each in the last chunk if that stays within the limit."""
    chunks: list[list[int]] = []
    total = 0
    for part in parts:
        own = load(part)
        more = own
        if chunks and load.group[part[0]] == load.group[chunks[-1][-1]]:
            more -= load.prompt_length[part[0]]
        if chunks and total + more <= limit:
            chunks[-1] += part
            total += more
        else:
            chunks.append(list(part))
            total = own
    return chunks
