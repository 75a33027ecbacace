"""Further passes and frozen weights of the critic on two sharded processes, as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.forked import Ranks
from tests.training.passes_on_ranks import run

WHOLE = ("training.minibatch_size=16", "critic.epochs=2", "critic.frozen=[self_attn.]")
PARTS = ("training.minibatch_size=8", "critic.minibatch_size=4", "critic.epochs=2")


def changed(steps: list[dict[str, Any]]) -> list[tuple[bool, bool]]:
    return [(step["changed"]["actor"], step["changed"]["critic"]) for step in steps]


@pytest.mark.slow
def test_one_process(tmp_path: Path) -> None:
    steps = run(tmp_path, 1, *PARTS)
    assert changed(steps) == ([(True, False)] * 2 + [(False, True)] * 8) * 2
    assert [step["global_step"] for step in steps] == list(range(1, 21))
    assert steps[-1]["schedules"] == [4, 16]
    assert steps[-1]["policy_steps"] == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_take_the_same_steps(two_ranks: Ranks, tmp_path: Path) -> None:
    """Whole batches have one gradient, however the ranks shuffle them: every metric is equal."""
    one = run(tmp_path, 1, *WHOLE)
    both = two_ranks.run(run, tmp_path / "whole", 2, *WHOLE)
    assert changed(one) == [(True, True), (False, True)] * 2
    for steps in both:
        assert changed(steps) == changed(one)
        for found, wanted in zip(steps, one, strict=True):
            assert found["outputs"].keys() == wanted["outputs"].keys()
            for key, value in wanted["outputs"].items():
                number = pytest.approx(float(value), rel=1e-3, abs=1e-6)
                assert float(found["outputs"][key]) == number, key
    for steps in two_ranks.run(run, tmp_path / "parts", 2, *PARTS):
        assert changed(steps) == ([(True, False)] * 2 + [(False, True)] * 8) * 2
