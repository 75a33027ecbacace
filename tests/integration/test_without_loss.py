"""Where no token of a minibatch carries a network's loss, the network does not move at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.without_loss import EXPECTED, run
from tests.poisoned import ROOT

NETWORKS = ("actor", "critic")


def check(seen: dict[str, Any]) -> None:
    """What every rank must have seen: Adam has momentum from the first iteration on."""
    expected = [pair for pairs in EXPECTED.values() for pair in pairs]
    assert len(seen["steps"]) == len(expected)
    updates = dict.fromkeys(NETWORKS, 0)
    for number, (step, pair) in enumerate(zip(seen["steps"], expected, strict=True), start=1):
        for name, has_loss in zip(NETWORKS, pair, strict=True):
            updates[name] += has_loss
            assert step["changed"][name] is has_loss, (number, name)
            assert step["changed"][f"{name}_adam"] is has_loss, (number, name)
            logged = [key for key in step["outputs"] if key.startswith(f"{name}/")]
            assert bool(logged) is has_loss, f"absent, not zero: step {number}, {logged}"
        assert step["schedules"] == list(updates.values()), number
        assert step["policy_steps"] == updates["actor"], number
        assert step["global_step"] == number, "the charts' x axis: a minibatch all the same"
    for logged, pairs in zip(seen["iterations"], EXPECTED.values(), strict=True):
        for name, of_network in zip(NETWORKS, zip(*pairs, strict=True), strict=True):
            assert logged[f"{name}/minibatches_without_loss"] == of_network.count(False)
            assert (f"time/{name}_update_s" in logged) is any(of_network)


def test_one_process() -> None:
    check(run(1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_sharded_processes_decide_alike(tmp_path: Path) -> None:
    """Where one response is left, the other rank has none: both step, or neither."""
    command = [sys.executable, "-m", "tests.integration.without_loss", str(tmp_path), "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=560
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for rank in range(2):
        check(json.loads((tmp_path / f"rank{rank}.json").read_text()))
