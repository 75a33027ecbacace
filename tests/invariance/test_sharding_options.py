"""What saves memory changes no gradient: recomputed activations, reductions of every micro-batch,
weights filled after sharding, clipping by a norm over shards."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.forked import Ranks, on_ranks
from tests.invariance.gradients import compute
from tests.invariance.test_gradients import MANY, ONE_FORWARD, assert_same

CHECKPOINTING = ("actor.gradient_checkpointing=true", "critic.gradient_checkpointing=true")
# FSDP2 runs its offload code on a CPU too, which the rules between options forbid to users
OFFLOADED = ("trainer.cpu_offload=true", "trainer.strategy=fsdp", "trainer.accelerator=auto")
CLIPPED = ("actor.optimizer.max_grad_norm=0.01", "critic.optimizer.max_grad_norm=0.02")


@pytest.fixture(scope="module")
def clipped() -> dict[str, Any]:
    return compute(1, ONE_FORWARD, *CLIPPED)


def test_clipping_acts(clipped: dict[str, Any]) -> None:
    metrics = clipped["metrics"]
    assert metrics["actor/clipped_norm"] == pytest.approx(0.01, rel=1e-4)
    assert metrics["critic/clipped_norm"] == pytest.approx(0.02, rel=1e-4)
    assert metrics["actor/grad_norm"] > 0.02
    assert metrics["critic/grad_norm"] > 0.04


def test_recomputed_activations_on_one_process(clipped: dict[str, Any]) -> None:
    assert_same(clipped, compute(1, MANY, *CLIPPED, *CHECKPOINTING))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "options"),
    [
        pytest.param(1, ("trainer.strategy=fsdp",), marks=pytest.mark.night),
        (2, ("trainer.reduce_every_microbatch=true",)),
        (2, OFFLOADED),
    ],
)
def test_every_option_on_shards(
    clipped: dict[str, Any], two_ranks: Ranks, processes: int, options: tuple[str, ...]
) -> None:
    """Every network is made on the meta device here, and clipped by the norm over its shards."""
    overrides = (*CLIPPED, *CHECKPOINTING, *options)
    step = (processes, MANY, *overrides)
    run = two_ranks.run if processes == 2 else partial(on_ranks, 1)
    sharded = run(compute, *step)
    assert_same(clipped, sharded[0])
