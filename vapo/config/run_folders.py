"""Which folders are those of runs. A config that lies in one is the run's own, not its user's."""

from __future__ import annotations

import os
from pathlib import Path

RECORD_NAME = "run.json"
"""In the folder of each run; the config.yaml beside it is the run's own."""


def is_run_folder(folder: str | Path) -> bool:
    """Whether a folder has the record of a run."""
    return os.path.exists(os.path.join(folder, RECORD_NAME))


def holds_a_run(folder: str | Path) -> bool:
    """Whether a folder has any file of a run, also where a copy left its record out."""
    names = (RECORD_NAME, "checkpoints", "tracking", "summary.json")
    return any(os.path.lexists(os.path.join(folder, name)) for name in names)
