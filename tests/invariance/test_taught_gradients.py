"""A critic's gradient on continuations does not depend on how its minibatch is cut or spread."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.forked import Ranks
from tests.invariance.gradients import (
    NUM_ROLLOUTS,
    FixedRollouts,
    RecordsGradients,
    config_on,
    fitted,
)
from tests.invariance.test_gradients import (
    MANY,
    ONE_FORWARD,
    PACKED,
    PADDED,
    assert_same,
    largest_relative_difference,
)
from tests.rollout_fixtures import make_rollouts
from vapo.advantages.estimators import estimate_advantages
from vapo.rollouts.batch import make_rollout_batch
from vapo.rollouts.rollout_rows import StoredRollout
from vapo.rollouts.stored_columns import StoredTruth, with_truth
from vapo.system.distributed import rank, world_size
from vapo.training.minibatches import Minibatch, make_minibatches
from vapo.types import Phase


def stored() -> list[StoredRollout]:
    """Made-up rollouts; most have some continuations, which another one may share."""
    draw = random.Random(0)
    rows = []
    for rollout, verdict in zip(*make_rollouts(NUM_ROLLOUTS, vocab_size=30), strict=True):
        places = [p for p in range(len(rollout.response_ids)) if draw.random() < 0.3]
        truth = [StoredTruth(p, draw.uniform(-1, 1), 4 / draw.randint(1, 3)) for p in places]
        rows.append(StoredRollout(verdict.on(rollout), "", truth=tuple(truth)))
    return rows


class TaughtRollouts(FixedRollouts):
    """Each rank's share of them, as one minibatch of the critic alone."""

    def train_dataloader(self) -> DataLoader[Minibatch]:
        module = self.trainer.lightning_module  # type: ignore[union-attr]
        assert isinstance(module, RecordsGradients)
        module.phase = Phase.VALUE_PRETRAINING
        share = NUM_ROLLOUTS // world_size()
        rows = stored()[rank() * share : (rank() + 1) * share]
        batch = make_rollout_batch(
            [row.rollout for row in rows],
            group_size=1,
            rewards=self.config.rewards,
            max_response_tokens=32,
        )
        if self.config.components.value_pretraining.targets == "truth":
            batch = with_truth(batch, [row.truth for row in rows])
        evaluated = module.add_logprobs_and_values(batch, module.phase, with_entropy=False)
        minibatches = make_minibatches(
            estimate_advantages(evaluated, module.phase, self.config),
            num_minibatches=1,
            max_tokens=module.microbatching.tokens,
            pad_id=0,
            layout=module.layout,
            seed=rank(),
            networks=("critic",),
        )
        return DataLoader(minibatches, batch_size=None)  # type: ignore[arg-type]


def compute(
    num_processes: int, budget: int, targets: str, weight: str, *overrides: str
) -> dict[str, Any]:
    """Gradients and metrics of one step. A rule keeps a file's rollouts to one process; what is
    made of them holds for any number, so the targets are set past it."""
    config = config_on(num_processes, budget, *overrides)
    options: dict[str, Any] = {"targets": targets, "truth_weight": weight}
    pretraining = replace(config.components.value_pretraining, **options)
    config = replace(config, components=replace(config.components, value_pretraining=pretraining))
    return fitted(RecordsGradients(config, pad_id=0), TaughtRollouts(config), config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "weight", ["draws", *(pytest.param(w, marks=pytest.mark.slow) for w in ("none", "only"))]
)
def test_many_microbatches_packed_or_padded_equal_one_padded(weight: str) -> None:
    whole = compute(1, ONE_FORWARD, "truth", weight, PADDED)
    assert whole["metrics"]["critic/value_loss"] > 0
    for layout in (PADDED, PACKED) if weight == "draws" else (PACKED,):
        assert_same(whole, compute(1, MANY, "truth", weight, layout))
    others = {"none": "only", "only": "draws", "draws": "none"}
    other = compute(1, ONE_FORWARD, "truth", others[weight], PADDED)
    assert largest_relative_difference(whole["gradients"], other["gradients"]) > 1e-2


@pytest.mark.slow
def test_two_sharded_processes_equal_one(two_ranks: Ranks) -> None:
    whole = compute(1, ONE_FORWARD, "truth", "draws", PADDED)
    sharded, _ = two_ranks.run(compute, 2, MANY, "truth", "draws", PACKED)
    assert_same(whole, sharded)


def test_returns_do_not_read_them() -> None:
    plain = compute(1, ONE_FORWARD, "returns", "draws", PADDED)
    taught = compute(1, ONE_FORWARD, "truth", "draws", PADDED)
    assert largest_relative_difference(plain["gradients"], taught["gradients"]) > 1e-2
    assert all(torch.isfinite(g).all() for g in taught["gradients"].values())
