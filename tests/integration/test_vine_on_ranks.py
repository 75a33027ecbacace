"""VinePPO on two sharded processes: values of steps and advantages as one process has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.config.fits import ON_STATE_TRACKING
from tests.forked import on_ranks
from tests.integration.commands import FEW_PROMPTS, ROOT, output_options
from tests.integration.recorded_iterations import (
    batch_of,
    continuer_of,
    recorded_fit,
    rollouts_of,
)
from tests.systems import estimated, system_config
from vapo.rollouts.continuations import with_step_values
from vapo.system.process import derive_seed
from vapo.types import EvaluatedBatch, RolloutBatch

SMALL = [
    *FEW_PROMPTS,
    "data.heldout.num_examples=4",
    "rollouts.max_response_tokens=12",
    "components.group_sampling.num_prompts=4",
    "components.group_sampling.group_size=4",
    "training.num_iterations=1",
    "training.minibatch_size=16",
    "algorithm.vine_segments.kind=tokens",
    "algorithm.vine_segments.num_tokens=3",
    "evaluation.k=1",
    "trainer.num_threads=1",
    "trainer.accelerator=cpu",
]


def advantages(batch: RolloutBatch, config: Any) -> Tensor:
    zeros = torch.zeros_like(batch.rollout_logprobs)
    made = estimated(config, EvaluatedBatch(**vars(batch), old_logprobs=zeros, ref_logprobs=zeros))
    assert made.advantages is not None
    return made.advantages


@pytest.mark.night  # by day in one process: tests/rollouts/test_step_values.py
@pytest.mark.timeout(600)
def test_two_processes_have_the_advantages_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = output_options(tmp_path)
    sharded = ["trainer.devices=2", "trainer.strategy=fsdp"]
    files = [*ON_STATE_TRACKING, "--config", "conf/algorithm/vineppo.yaml"]
    ranks = [
        iteration for (iteration,) in on_ranks(2, recorded_fit, *files, *SMALL, *where, *sharded)
    ]
    monkeypatch.chdir(ROOT)
    config = system_config("vineppo", *SMALL)
    parts, costs = [], []
    with continuer_of(config) as continuation_sampler:
        for rank, recorded in enumerate(ranks):
            batch = batch_of(rollouts_of(recorded), continuation_sampler, group_size=4)
            seed = derive_seed(config.seed, "continuations", 0, rank)
            made, cost = with_step_values(batch, continuation_sampler, seed=seed)
            assert made.step_starts is not None
            assert made.step_values is not None
            assert torch.equal(made.step_starts, recorded["step_starts"])
            torch.testing.assert_close(made.step_values, recorded["step_values"])
            parts.append(made)
            costs.append(cost)
        rollouts = [rollout for part in parts for rollout in part.rollouts]
        whole = batch_of(rollouts, continuation_sampler, group_size=4)
    assert len({rollout.prompt.prompt_id for rollout in rollouts}) == 4
    whole = with_steps_of(parts, whole)
    expected = advantages(whole, config)
    assert len(expected[whole.response_mask].unique()) > 8
    own = torch.cat([advantages(part, config)[part.response_mask] for part in parts])
    assert not torch.allclose(own, expected[whole.response_mask]), "or whitening would not show"
    for rank, recorded in enumerate(ranks):
        width = recorded["response_mask"].shape[1]
        torch.testing.assert_close(
            recorded["advantages"], expected[rank * 8 : rank * 8 + 8, :width], atol=1e-5, rtol=1e-5
        )
        metrics = recorded["metrics"]
        for name in ("vine/num_continuation_tokens", "vine/num_prefixes"):
            assert metrics[name] == costs[0][name] + costs[1][name]
        tokens = int(whole.response_mask.sum())
        assert metrics["vine/token_ratio"] == metrics["vine/num_continuation_tokens"] / tokens


def with_steps_of(parts: list[RolloutBatch], whole: RolloutBatch) -> RolloutBatch:
    """The parts' steps on the rows of a batch of all of them, which is as wide as the widest."""
    starts = torch.zeros_like(whole.response_mask)
    values = torch.zeros_like(whole.rollout_logprobs)
    first = 0
    for part in parts:
        assert part.step_starts is not None
        assert part.step_values is not None
        rows, width = slice(first, first + len(part)), part.response_mask.shape[1]
        starts[rows, :width], values[rows, :width] = part.step_starts, part.step_values
        first += len(part)
    return replace(whole, step_starts=starts, step_values=values)
