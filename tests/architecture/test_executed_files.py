"""How much of the package one training iteration is: so many files has its reader to read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.commands import SMALL, store

ROOT = Path(__file__).parents[2]
MAX_FILES = 62


@pytest.mark.parametrize("folder", [".", "windy_walk"], ids=["responses", "episodes"])
def test_an_iteration_executes_few_files(folder: str, tmp_path: Path) -> None:
    """Without the shape checks, whose functions would count."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.architecture.executed_files"),
            *("fit", "--config", f"conf/{folder}/vapo.yaml", *SMALL),
            *("components.value_pretraining.num_iterations=0", "training.num_iterations=1"),
            *("components.group_sampling.num_prompts=4", "training.minibatch_size=8"),
            *("evaluation.k=2", "evaluation.num_prompts=4"),
            f"output_dir={tmp_path / 'runs'}",
            f"tracking.uri={store(tmp_path)}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = json.loads(done.stdout.splitlines()[-1])
    assert {"training/iteration.py", "training/objective.py", "rollouts/source.py"} <= set(files)
    assert len(files) <= MAX_FILES, "\n".join(sorted(files))
