"""Runs the real `vapo` command, as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# small enough for seconds, with both phases and every component on
SMALL = [
    "components.value_pretraining.num_iterations=2",
    "components.value_pretraining.min_iterations=1",
    "components.group_sampling.num_prompts=8",
    "components.group_sampling.group_size=4",
    "training.num_iterations=3",
    "training.minibatch_size=16",
    "data.train.num_examples=128",
    "data.heldout.num_examples=16",
    "evaluation.k=2",
    "evaluation.every_n_iterations=2",
    "trainer.num_threads=1",
    "trainer.accelerator=cpu",
]


def vapo(*args: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run `vapo ARGS` in the repository's root."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "vapo", *args],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def fit(tmp_path: Path, *args: str, mlruns: Path | None = None) -> Path:
    """A small `vapo fit` that must succeed; returns the run's folder, the last line printed."""
    result = vapo(
        "fit",
        *("--config", "conf/vapo.yaml"),
        *SMALL,
        f"output_dir={tmp_path / 'runs'}",
        f"tracking.uri={mlruns or tmp_path / 'mlruns'}",
        *args,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return Path(result.stdout.strip().splitlines()[-1])


def summary(run_dir: Path) -> dict[str, Any]:
    contents = json.loads((run_dir / "summary.json").read_text())
    assert isinstance(contents, dict)
    return contents
