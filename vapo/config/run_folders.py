"""Recognize the folder of a run. A config in it was written by the run, not by its user."""

from __future__ import annotations

import os
from pathlib import Path

RECORD_NAME = "run.json"
"""The file that each run has in its folder; the config.yaml beside it is the run's own."""


def is_run_folder(folder: str | Path) -> bool:
    """Whether a folder has the record of a run."""
    return os.path.exists(os.path.join(folder, RECORD_NAME))


def holds_a_run(folder: str | Path) -> bool:
    """Whether a folder has any file of a run, also where a copy left its record out."""
    names = (RECORD_NAME, "checkpoints", "tracking", "summary.json")
    return any(os.path.lexists(os.path.join(folder, name)) for name in names)
