"""Cut a simulated minibatch into micro-batches as training does, and choose the few that run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vapo.config import FitConfig
from vapo.networks.token_inputs import Layout
from vapo.studies.estimate.sizes import Lengths, local_minibatch, longest_rows, worst_microbatch
from vapo.studies.estimate.step_counts import StepWork
from vapo.training.minibatches import cut_microbatches
from vapo.types import FinishReason, Prompt, Rollout, TrainingBatch


class Part(NamedTuple):
    """A micro-batch that the simulation runs: its size, and the number of the critic it trains."""

    size: Lengths
    member: int = 0


@dataclass(frozen=True)
class Cut:
    """A minibatch cut into micro-batches as in training, with the few that the simulation runs.

    Attributes:
        counted: size -> how many micro-batches of that size training makes.
        run: the micro-batches to simulate. Each size runs once for each critic that has it. The
            last one is as full as the budget allows: it needs the most memory, on top of the
            gradients of all the others.
    """

    counted: Counter[Lengths]
    run: list[Part]

    @property
    def num_microbatches(self) -> int:
        return self.counted.total()

    def work(self, works: list[StepWork]) -> StepWork:
        """Return the work of the whole minibatch.

        FLOPs are counted by size. Collectives do not depend on the size: each micro-batch before
        the last sends what the first one sends.

        Args:
            works: the work of each micro-batch in `run`.
        """
        whole = StepWork()
        whole.add(works[-1])
        whole.add(works[0], times=self.num_microbatches - 1)
        flops = {part.size: work.flops for part, work in zip(self.run, works, strict=True)}
        whole.flops = sum(count * flops[size] for size, count in self.counted.items())
        return whole


def cut_minibatch(config: FitConfig, network: str, layout: Layout) -> Cut:
    """Cut a process's minibatch into micro-batches. Every response is as long as it may be.

    With shared prompts, the responses are spread over all prompts that the process has. Several
    critics have equally many prompts. Every rank must call this.

    Args:
        network: "actor" or "critic".
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
    """Make a batch of `size`.

    Its lengths and critic numbers are true, all other numbers made up.
    """
    prompts = [
        Prompt(str(i), "", (i,) * size.prompt_tokens, "")
        for i in range(min(size.prompts, size.rows))
    ]
    response, num = (0,) * size.response_tokens, len(prompts)
    rollouts = [
        Rollout(prompts[i % num], response, "", (), FinishReason.STOP) for i in range(size.rows)
    ]
    members = torch.tensor([i % num % num_critics for i in range(size.rows)])
    return fake_rows(size.rows, 1, has_kl=False, rollouts=rollouts, critic_members=members)


def fake_rows(num_rows: int, num_tokens: int, *, has_kl: bool, **columns: Any) -> TrainingBatch:
    """Make a batch of zeros whose `num_tokens` tokens in each row all count in every loss.

    Args:
        has_kl: whether the batch has log-probs of the reference policy.
        columns: values that replace columns of the batch.
    """
    column = torch.zeros(num_rows, num_tokens)
    row, mask = column[:, 0], column == 0
    zeros: dict[str, Any] = {
        "rollouts": [],
        "response_ids": column.long(),
        **dict.fromkeys(("is_correct", "is_lost"), row == 0),
        "is_filler": row != 0,
        **dict.fromkeys(("rewards", "unshaped_rewards", "value_weights"), row),
        **dict.fromkeys(_MASKS, mask),
        **dict.fromkeys(_COLUMNS, column),
        "ref_logprobs": column if has_kl else None,
    }
    return TrainingBatch(**zeros | columns, group_size=1, max_response_tokens=num_tokens)


_MASKS = (
    *("response_mask", "loss_mask", "value_mask", "turn_starts"),
    *("policy_mask", "entropy_mask"),
)
_COLUMNS = (
    *("rollout_logprobs", "turn_rewards", "old_logprobs", "old_values", "token_rewards"),
    *("value_rewards", "importance_weights", "value_draws", "advantages", "value_targets"),
)
