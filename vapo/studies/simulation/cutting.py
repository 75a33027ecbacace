"""The micro-batches of a simulated minibatch: cut as in training, but few of them are run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vapo.config import FitConfig
from vapo.networks.token_inputs import Layout
from vapo.studies.memory.sizes import Lengths, local_minibatch, longest_rows, worst_microbatch
from vapo.studies.simulation.counting import StepWork
from vapo.training.minibatches import cut_microbatches
from vapo.types import FinishReason, Prompt, Rollout, TrainingBatch


class Part(NamedTuple):
    """A micro-batch that is run: its size, and of several critics which one it trains."""

    size: Lengths
    member: int = 0


@dataclass(frozen=True)
class Cut:
    """`counted`: how many micro-batches of each size training makes; `run`: those simulated.

    Each size is run once, for each critic that has one, and at last a micro-batch that is as full
    as the budget allows: the arithmetic's, whose memory is the most. Only that of the last one
    comes on top of the gradients of all others.
    """

    counted: Counter[Lengths]
    run: list[Part]

    @property
    def num_microbatches(self) -> int:
        return self.counted.total()

    def work(self, works: list[StepWork]) -> StepWork:
        """Of the whole minibatch, from that of what was run: FLOPs are by size.

        What is sent is not: all micro-batches before the last send what the first one does.
        """
        whole = StepWork()
        whole.add(works[-1])
        whole.add(works[0], times=self.num_microbatches - 1)
        flops = {part.size: work.flops for part, work in zip(self.run, works, strict=True)}
        whole.flops = sum(count * flops[size] for size, count in self.counted.items())
        return whole


def cut_of(config: FitConfig, network: str, layout: Layout) -> Cut:
    """Cut a process's minibatch of `actor` or `critic`, where every response is the longest.

    Each response answers a prompt of its own as far as the process has as many; of several critics
    each has as many prompts as another. Every rank must call it.
    """
    num_rows = local_minibatch(config, network)
    shares = layout == "shared_prompts"
    longest = longest_rows(config, num_rows, shares_prompts=shares)
    worst = worst_microbatch(config, num_rows, shares_prompts=shares)
    num_critics = config.critic.count if network == "critic" else 1
    chunks = cut_microbatches(
        batch := _longest_rollouts(longest, num_critics=num_critics),
        list(range(num_rows)),
        for_critic=network == "critic",
        max_tokens=config.training.first_microbatch_tokens,
        pad_id=0,
        layout=layout,
    ).chunks
    assert batch.critic_members is not None
    parts = []
    for rows in chunks:
        num_prompts = len({row % longest.prompts for row in rows}) if shares else len(rows)
        size = longest._replace(rows=len(rows), prompts=num_prompts)
        parts.append(Part(size, int(batch.critic_members[rows[0]])))
    run = list(dict.fromkeys(parts[:-1]))
    if parts[-1].size not in {worst, *(part.size for part in run)}:
        run.append(parts[-1])
    run.append(parts[-1]._replace(size=worst))
    return Cut(Counter(part.size for part in parts), run)


def _longest_rollouts(size: Lengths, *, num_critics: int) -> TrainingBatch:
    """Rows of which only the lengths, and which critic trains on them, are true."""
    prompts = [
        Prompt(str(i), "", (i,) * size.prompt_tokens, "")
        for i in range(min(size.prompts, size.rows))
    ]
    response, num = (0,) * size.response_tokens, len(prompts)
    rollouts = [
        Rollout(prompts[i % num], response, "", (), FinishReason.STOP) for i in range(size.rows)
    ]
    members = torch.tensor([i % num % num_critics for i in range(size.rows)])
    return made_up_rows(size.rows, 1, has_kl=False, rollouts=rollouts, critic_members=members)


def made_up_rows(num_rows: int, num_tokens: int, *, has_kl: bool, **columns: Any) -> TrainingBatch:
    """Rows of so many tokens, each with every loss, whose numbers are 0."""
    column = torch.zeros(num_rows, num_tokens)
    row, mask = column[:, 0], column == 0
    made: dict[str, Any] = {
        "rollouts": [],
        "response_ids": column.long(),
        **dict.fromkeys(("is_correct", "is_lost"), row == 0),
        "is_filler": row != 0,
        **dict.fromkeys(("rewards", "unshaped_rewards", "value_weights"), row),
        **dict.fromkeys(_MASKS, mask),
        **dict.fromkeys(_COLUMNS, column),
        "ref_logprobs": column if has_kl else None,
    }
    return TrainingBatch(**made | columns, group_size=1, max_response_tokens=num_tokens)


_MASKS = (
    *("response_mask", "loss_mask", "value_mask", "turn_starts"),
    *("policy_mask", "entropy_mask"),
)
_COLUMNS = (
    *("rollout_logprobs", "turn_rewards", "old_logprobs", "old_values", "token_rewards"),
    *("value_rewards", "importance_weights", "value_draws", "advantages", "value_targets"),
)
