"""Which of a run's processes reports for it."""

from __future__ import annotations

import os
from collections.abc import Mapping


def is_main_process(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process reports for the run: global rank 0, known before any set-up.

    Launchers that set a global rank (`RANK`, `SLURM_PROCID`) are believed; otherwise the first
    process of the first host is meant (`NODE_RANK`, `LOCAL_RANK`).
    """
    for name in ("RANK", "SLURM_PROCID"):
        if environ.get(name):
            return environ[name] == "0"
    return all(environ.get(name) in (None, "", "0") for name in ("NODE_RANK", "LOCAL_RANK"))
