"""Cuts a rollout batch into passes, each pass into minibatches, and these into micro-batches.

A pass goes over the shuffled rollout batch once, in minibatches of one size. A minibatch is one
optimizer step. A micro-batch is one forward and backward pass, within a budget of tokens. Every
loss denominator is counted here, once per minibatch and over all ranks, so that a minibatch's
gradient does not depend on how it is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from vapo.config import FitConfig, resolve
from vapo.config.hyperparameters import num_actor_steps
from vapo.functional.columns import moved_to, select_rows
from vapo.functional.masking import LossReduction, zero_outside
from vapo.networks.forward_passes import cut_rollouts
from vapo.networks.token_inputs import Layout, TokenInputs, has_critic_prompts, rollout_inputs
from vapo.system.distributed import gather_over_ranks, rank, sum_over_ranks
from vapo.types import Phase, TrainingBatch

NETWORKS = ("actor", "critic")


class Pass(NamedTuple):
    """One pass over the rollout batch: the networks that it trains, its number of minibatches."""

    networks: tuple[str, ...]
    num_minibatches: int


def passes(config: FitConfig, phase: Phase) -> list[Pass]:
    """Return the passes over the rollout batch of an iteration in this phase, in their order.

    The critic makes `critic.epochs` passes, all on the value targets from before its first one.
    Actor and critic share the first pass if their minibatches are equally large. Every other pass
    trains one network. At the defaults there is one pass, which trains every network that the phase
    trains.

    Source: SAO (2 critic epochs to one of the actor); EasyPPO (4 minibatches of the critic to one
    of the actor).
    """
    of_actor = Pass(("actor",), num_minibatches(config, "actor"))
    if not config.algorithm.has_critic:
        return [of_actor]
    of_critic = Pass(("critic",), num_minibatches(config, "critic"))
    of_critics = [of_critic] * config.critic.epochs
    if phase is Phase.VALUE_PRETRAINING:
        return of_critics
    if of_actor.num_minibatches == of_critic.num_minibatches:
        return [Pass(NETWORKS, of_actor.num_minibatches), *of_critics[1:]]
    return [of_actor, *of_critics]


def num_minibatches(config: FitConfig, network: str) -> int:
    """Return the number of optimizer steps of `actor` or `critic` in one pass."""
    if network == "actor":
        return num_actor_steps(config)
    hyperparameters = resolve(config)
    total = hyperparameters.num_prompts * hyperparameters.group_size
    size = config.critic.minibatch_size or config.training.minibatch_size or total
    return config.critic.num_minibatches or total // size


def num_steps(config: FitConfig, phase: Phase) -> int:
    """Return the number of minibatches, over all passes, of an iteration in the phase."""
    return sum(part.num_minibatches for part in passes(config, phase))


def common_minibatches(config: FitConfig) -> int:
    """Return the least common multiple of the passes' numbers of minibatches.

    A batch that splits evenly into this number also splits evenly into the minibatches of each
    network.
    """
    return math.lcm(*(part.num_minibatches for part in passes(config, Phase.POLICY_OPTIMIZATION)))


@dataclass(frozen=True)
class Microbatch:
    """Rows of one forward and backward pass: the network's inputs and all columns of the rows."""

    inputs: TokenInputs
    rows: TrainingBatch

    def to(self, device: torch.device) -> Microbatch:
        return Microbatch(self.inputs.to(device), moved_to(self.rows, device))


@dataclass(frozen=True)
class Microbatches:
    """An iterable of micro-batches. Each is cut from the rollout batch when it is iterated over, so
    that memory holds no second copy of the batch.

    `chunks` has the row numbers of each micro-batch, and `cut` makes a micro-batch of row numbers.
    """

    chunks: list[list[int]]
    cut: Callable[[list[int]], Microbatch]

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[Microbatch]:
        return map(self.cut, self.chunks)


def cut_microbatches(
    batch: TrainingBatch,
    rows: list[int],
    *,
    for_critic: bool,
    max_tokens: int,
    pad_id: int,
    layout: Layout,
) -> Microbatches:
    """Cut a batch's rows into micro-batches of at most `max_tokens` tokens of one network's inputs.

    With `for_critic` the critic's prompts count, which may be longer than the policy's. If there
    are several critics, each micro-batch has rows of one critic. A critic without a loss on its
    rows gets no micro-batch, because Adam would move it even with a gradient of 0.
    """

    def microbatch(rows: list[int]) -> Microbatch:
        inputs = rollout_inputs(batch, rows, pad_id=pad_id, layout=layout, for_critic=for_critic)
        return Microbatch(inputs, select_rows(batch, rows, width=inputs.response_mask.shape[1]))

    parts = [rows]
    if for_critic and batch.critic_members is not None:
        of_members: dict[int, list[int]] = {}
        for row, member in zip(rows, batch.critic_members[rows].tolist(), strict=True):
            of_members.setdefault(member, []).append(row)
        has_loss = batch.value_mask.any(dim=1)
        parts = [part for _, part in sorted(of_members.items()) if bool(has_loss[part].any())]
    chunks: list[list[int]] = []
    for part in parts:
        chunks += cut_rollouts(
            batch, part, max_tokens=max_tokens, layout=layout, for_critic=for_critic
        )
    return Microbatches(chunks, microbatch)


@dataclass(frozen=True)
class Minibatch:
    """What one optimizer step trains on. The counts are of all micro-batches of all ranks.

    Attributes:
        num_tokens, num_responses: the tokens with loss, and the responses that have some.
        num_positive_tokens: the tokens with loss in correct responses.
        num_policy_tokens, num_policy_responses: the tokens with policy loss, and the responses that
            have some.
        num_advantage_tokens: the policy tokens whose advantage and importance weight are not 0. The
            policy loss of the others is 0, whatever the policy is.
        num_value_tokens: the tokens with value loss.
        num_value_draws: the number of returns that the targets of these tokens are means of.
        num_entropy_tokens: the tokens with the entropy bonus.
        networks: the networks that this step trains.
        critic_microbatches: micro-batches with the critic's prompts, each for one critic if there
            are several. If None, the critic reads `microbatches` too.
        fault: why nothing of this may be trained on; None: it may.
    """

    microbatches: Microbatches
    num_tokens: int
    num_responses: int
    num_positive_tokens: int
    num_policy_tokens: int
    num_policy_responses: int
    num_advantage_tokens: int
    num_value_tokens: int
    num_value_draws: float
    num_entropy_tokens: int
    max_response_tokens: int
    networks: tuple[str, ...] = NETWORKS
    critic_microbatches: Microbatches | None = None
    fault: str | None = None

    def of(self, network: str) -> Microbatches:
        """Return the micro-batches that the network, `actor` or `critic`, is trained on."""
        if network == "critic" and self.critic_microbatches is not None:
            return self.critic_microbatches
        return self.microbatches

    def denominator(self, reduction: LossReduction, *, of_policy: bool = False) -> int:
        """Return the number that `losses.aggregate` divides a loss of this minibatch by.

        Tokens and responses are counted by `loss_mask`, or by `policy_mask` if `of_policy`.
        """
        num_tokens, num_responses = self.num_tokens, self.num_responses
        if of_policy:
            num_tokens, num_responses = self.num_policy_tokens, self.num_policy_responses
        if reduction == "token_mean":
            return num_tokens
        return num_responses * (self.max_response_tokens if reduction == "constant_length" else 1)


def make_minibatches(
    batch: TrainingBatch,
    *,
    num_minibatches: int,
    max_tokens: int,
    pad_id: int,
    layout: Layout = "padded",
    seed: int,
    networks: tuple[str, ...] = NETWORKS,
) -> list[Minibatch]:
    """Shuffle a rank's rollouts and split them into minibatches; each row is used once.

    Rows without loss are spread evenly over the minibatches (`spread_rows`). Every rank must call
    this.

    Args:
        num_minibatches: the number of minibatches. It must divide the rank's number of rollouts.
        max_tokens: the token budget of a micro-batch. In the padded layout padding counts, too.
        layout: the layout of micro-batches, which both networks must support.
        seed: the seed of the permutation.
        networks: the networks that the minibatches train.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(batch), generator=generator).tolist()
    if len(order) % num_minibatches:
        raise ValueError(f"{len(order)} rollouts do not split into {num_minibatches} minibatches")
    lacks = losses_lacked(batch)
    num_trained = gather_over_ranks((lacks == 0).sum().reshape(1))
    spread = spread_rows(
        order,
        lacks.tolist(),
        num_minibatches=num_minibatches,
        first=int(num_trained[: rank()].sum()) % num_minibatches,
    )
    # OPPO's prompts with the answer are not for a critic
    has_own = batch.answer_logprobs is None and has_critic_prompts(batch)
    has_own |= batch.critic_members is not None
    has_own |= batch.actor_states is not None
    cut = partial(cut_microbatches, batch, max_tokens=max_tokens, pad_id=pad_id, layout=layout)
    return [
        Minibatch(
            cut(rows, for_critic=False),
            critic_microbatches=cut(rows, for_critic=True) if has_own else None,
            max_response_tokens=batch.max_response_tokens,
            networks=networks,
            **_counted(batch, rows),
        )
        for rows in spread
    ]


def losses_lacked(batch: TrainingBatch) -> Int[Tensor, " B"]:
    """Return a number for each row, which says which losses have no token in the row.

    The number is a sum: 1 for the surrogate, 2 for the critic's loss, 4 for the policy's other
    losses. It is 0 if every loss has a token. A row without the policy's other losses has no
    surrogate loss either.
    """
    masks = (batch.policy_mask, batch.value_mask, batch.loss_mask)
    return torch.stack([~mask.any(dim=1) * 2**i for i, mask in enumerate(masks)]).sum(dim=0)


def spread_rows(
    order: Sequence[int], lacks: Sequence[int], *, num_minibatches: int, first: int = 0
) -> list[list[int]]:
    """Split rows into equally large minibatches, so that rows which lack a loss are spread evenly.

    If no row lacks a loss, minibatch m is the m-th part of `order`. Otherwise, for each k, the
    minibatches' counts of rows with `lacks` at most k differ by at most 1. Rows without loss
    (filtered responses, rows that only fill up) therefore do not leave one minibatch with next to
    no loss. Within a minibatch rows keep their order.

    Args:
        order: the rows, shuffled; `num_minibatches` divides their number.
        lacks: which losses each row lacks, as `losses_lacked` returns it; 0: none.
        first: the minibatch that gets the first row. Each rank begins where the rank before it
            ended, so that the counts are even over all ranks, too.

    >>> spread_rows([3, 1, 0, 2], [0, 0, 0, 0], num_minibatches=2)
    [[3, 1], [0, 2]]
    >>> spread_rows([3, 1, 0, 2], [0, 2, 0, 2], num_minibatches=2)
    [[3, 0], [1, 2]]
    """
    size = len(order) // num_minibatches
    by_turns = [order[m * size + i] for i in range(size) for m in range(num_minibatches)]
    by_turns.sort(key=lambda row: lacks[row])
    starts = [(m - first) % num_minibatches for m in range(num_minibatches)]
    place = {row: index for index, row in enumerate(order)}
    return [sorted(by_turns[start::num_minibatches], key=place.__getitem__) for start in starts]


def _counted(batch: TrainingBatch, rows: list[int]) -> dict[str, Any]:
    """Return a `Minibatch`'s `num_` fields, counted over the rows of all ranks."""
    policy_mask, value_mask = batch.policy_mask[rows], batch.value_mask[rows]
    tokens, policy_tokens = batch.loss_mask[rows].sum(dim=1), policy_mask.sum(dim=1)
    # a nan is one, too: it must show in the loss
    has_advantage = torch.tensor(False)
    if batch.advantages is not None:
        has_advantage = (batch.advantages[rows] != 0) & (batch.importance_weights[rows] != 0)
    counts = {
        "num_tokens": tokens.sum(),
        "num_responses": (tokens > 0).sum(),
        "num_positive_tokens": (tokens * batch.is_correct[rows]).sum(),
        "num_policy_tokens": policy_tokens.sum(),
        "num_policy_responses": (policy_tokens > 0).sum(),
        "num_advantage_tokens": (policy_mask & has_advantage).sum(),
        "num_value_tokens": value_mask.sum(),
        "num_entropy_tokens": batch.entropy_mask[rows].sum(),
    }
    totals = sum_over_ranks(torch.stack(list(counts.values()))).tolist()
    draws = sum_over_ranks(zero_outside(batch.value_draws[rows], value_mask).double().sum())
    return {**dict(zip(counts, totals, strict=True)), "num_value_draws": float(draws)}
