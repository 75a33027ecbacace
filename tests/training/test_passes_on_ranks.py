"""Further passes and frozen weights of the critic on two sharded processes, as on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.poisoned import ROOT
from tests.training.passes_on_ranks import run

WHOLE = ("training.minibatch_size=16", "critic.epochs=2", "critic.frozen=[self_attn.]")
PARTS = ("training.minibatch_size=8", "critic.minibatch_size=4", "critic.epochs=2")


def two_ranks(folder: Path, *options: str) -> list[list[dict[str, Any]]]:
    folder.mkdir()
    result = subprocess.run(
        [sys.executable, "-m", "tests.training.passes_on_ranks", str(folder), "2", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads((folder / f"rank{i}.json").read_text()) for i in range(2)]


def changed(steps: list[dict[str, Any]]) -> list[tuple[bool, bool]]:
    return [(step["changed"]["actor"], step["changed"]["critic"]) for step in steps]


def test_one_process(tmp_path: Path) -> None:
    steps = run(tmp_path, 1, *PARTS)
    assert changed(steps) == ([(True, False)] * 2 + [(False, True)] * 8) * 3
    assert [step["global_step"] for step in steps] == list(range(1, 31))
    assert steps[-1]["schedules"] == [6, 24]
    assert steps[-1]["policy_steps"] == 6


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_take_the_same_steps(tmp_path: Path) -> None:
    """Whole batches have one gradient, however the ranks shuffle them: every metric is equal."""
    one = run(tmp_path, 1, *WHOLE)
    both = two_ranks(tmp_path / "whole", *WHOLE)
    assert changed(one) == [(True, True), (False, True)] * 3
    for steps in both:
        assert changed(steps) == changed(one)
        for found, wanted in zip(steps, one, strict=True):
            assert found["outputs"].keys() == wanted["outputs"].keys()
            for key, value in wanted["outputs"].items():
                number = pytest.approx(float(value), rel=1e-3, abs=1e-6)
                assert float(found["outputs"][key]) == number, key
    for steps in two_ranks(tmp_path / "parts", *PARTS):
        assert changed(steps) == ([(True, False)] * 2 + [(False, True)] * 8) * 3
