"""Where no token of a minibatch carries a network's loss, the network does not move at all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.forked import Ranks
from tests.integration.without_loss import EXPECTED, run

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


@pytest.mark.slow
def test_one_process() -> None:
    check(run(1))


@pytest.mark.night  # tests/training/test_faults.py has two that skip alike
@pytest.mark.timeout(600)
def test_two_sharded_processes_decide_alike(two_ranks: Ranks) -> None:
    """Where one response is left, the other rank has none: both step, or neither."""
    for seen in two_ranks.run(run, 2, timeout_s=560):
        check(seen)
