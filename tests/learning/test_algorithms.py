"""Every system raises the held-out score of state tracking."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learning.test_learning import train
from tests.systems import SYSTEMS

pytestmark = [pytest.mark.learning, pytest.mark.timeout(900)]

# One optimizer step an iteration where the others take four: a larger one.
ONE_STEP = {"rloo", "remax", "easyppo"}
OWN = {
    "adapters": ["actor.optimizer.lr=1e-3"],  # they need a higher rate, as the preset says
    "vineppo": [
        r"algorithm.vine_segments.pattern=\d",  # a step of state tracking ends with its position
        "algorithm.vine_segments.max_segments=4",
        "algorithm.vine_continuations=4",
    ],
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_system_learns(system: str, tmp_path: Path) -> None:
    before, after = train(
        tmp_path,
        *("--config", "conf/state_tracking/vapo.yaml"),
        *("--config", f"conf/algorithm/{system}.yaml"),
        "training.num_iterations=25",
        "evaluation.every_n_iterations=25",
        *(["actor.optimizer.lr=3e-4"] if system in ONE_STEP else []),
        *OWN.get(system, []),
    )
    assert after >= before + 0.1
