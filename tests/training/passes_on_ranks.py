"""Three iterations with two critic passes and frozen weights, on one process or several.

Run as `python -m tests.training.passes_on_ranks OUT NUM_PROCESSES OPTION...`: every rank writes the
metrics of its steps to OUT/rank0.json, OUT/rank1.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests import poisoned
from vapo.system.distributed import rank


def run(out: Path, num_processes: int, *options: str) -> list[dict[str, Any]]:
    found = poisoned.run(out, num_processes, {}, "training.num_iterations=3", *options)
    assert not any(found["totals"].values()), "nothing was skipped"
    steps: list[dict[str, Any]] = found["steps"]
    return steps


if __name__ == "__main__":
    folder, processes = Path(sys.argv[1]), int(sys.argv[2])
    seen = run(folder, processes, *sys.argv[3:])
    (folder / f"rank{rank()}.json").write_text(json.dumps(seen))
