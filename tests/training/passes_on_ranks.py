"""Two iterations with two critic passes and frozen weights, on one process or several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import poisoned


def run(out: Path, num_processes: int, *options: str) -> list[dict[str, Any]]:
    found = poisoned.run(out, num_processes, {}, "training.num_iterations=2", *options)
    assert not any(found["totals"].values()), "nothing was skipped"
    steps: list[dict[str, Any]] = found["steps"]
    return steps
