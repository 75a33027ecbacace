"""Runs the `vapo` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from vapo import cli

ROOT = Path(__file__).parents[2]

# small enough for seconds, with both phases and every component on
FEW_PROMPTS = ["data.train.num_examples=128", "data.heldout.num_examples=16"]
SMALL = [
    *FEW_PROMPTS,
    "components.value_pretraining.num_iterations=2",
    "components.value_pretraining.min_iterations=1",
    "components.group_sampling.num_prompts=8",
    "components.group_sampling.group_size=4",
    "training.num_iterations=3",
    "training.minibatch_size=16",
    "evaluation.k=2",
    "evaluation.every_n_iterations=2",
    "trainer.num_threads=1",
    "trainer.accelerator=cpu",
]


Result = subprocess.CompletedProcess[str]


def vapo(*args: str) -> Result:
    """`vapo ARGS` in the repository's root, in this process: loading torch and Lightning takes
    longer than a small run. Shapes are checked in it, too."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), chdir(ROOT):
        code = cli.main(args)
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def vapo_process(*args: str, timeout: float = 240) -> Result:
    """The same as a process of its own: what starts others, or an engine that ends with it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "vapo", *args],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def store(tmp_path: Path) -> Path:
    """The session's tracking store: making one takes seconds, so the tests share it."""
    return tmp_path.parent / "mlruns"


def fit(
    tmp_path: Path,
    *args: str,
    run: Callable[..., Result] = vapo,
    small: Sequence[str] = SMALL,
) -> Path:
    """A small `vapo fit` that must succeed; returns the run's folder, the last line printed."""
    result = run(
        "fit",
        *("--config", "conf/vapo.yaml"),
        *small,
        f"output_dir={tmp_path / 'runs'}",
        f"tracking.uri={store(tmp_path)}",
        *args,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return Path(result.stdout.strip().splitlines()[-1])


def summary(run_dir: Path) -> dict[str, Any]:
    contents = json.loads((run_dir / "summary.json").read_text())
    assert isinstance(contents, dict)
    return contents
