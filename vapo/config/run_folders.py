"""Which folders are those of runs. A config that lies in one is the run's own, not its user's."""

from __future__ import annotations

import os
from pathlib import Path

RECORD_NAME = "run.json"
"""In the folder of each run; the config.yaml beside it is the run's own."""


def is_run_folder(folder: str | Path) -> bool:
    """Whether a run has its record here."""
    return os.path.exists(os.path.join(folder, RECORD_NAME))


def holds_a_run(folder: str | Path) -> bool:
    """Whether a folder has anything of a run's, also where its record was left out of a copy."""
    names = (RECORD_NAME, "checkpoints", "tracking", "summary.json")
    return any(os.path.lexists(os.path.join(folder, name)) for name in names)
