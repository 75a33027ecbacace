"""How much of the package one training iteration is: so many files has its reader to read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import forked
from tests.architecture.executed_files import executed
from tests.integration.commands import SHORTEST, output_options

MAX_FILES = 63


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "own"),
    [(".", []), ("tug_of_war", ["environment.args.num_turns=5", "environment.max_turns=6"])],
    ids=["responses", "episodes"],
)
def test_an_iteration_executes_few_files(folder: str, own: list[str], tmp_path: Path) -> None:
    """Without the shape checks, whose functions would count."""
    options = [
        *("fit", "--config", f"conf/{folder}/vapo.yaml", *SHORTEST),
        *("components.value_pretraining.num_iterations=0", "training.num_iterations=1"),
        *("rollouts.max_response_tokens=96", "evaluation.num_prompts=4"),
        *own,
        *output_options(tmp_path),
    ]
    log = tmp_path / "log.txt"
    code = forked.end(forked.start(log, {}, executed, options), timeout_s=240)
    assert code == 0, log.read_text()[-3000:]
    files = json.loads(log.read_text().splitlines()[-1])
    assert {"training/iteration.py", "training/objective.py", "rollouts/source.py"} <= set(files)
    assert len(files) <= MAX_FILES, "\n".join(sorted(files))
