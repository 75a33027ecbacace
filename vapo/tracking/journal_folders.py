"""The folder of a journal: its files' names, whose records are in it, and what it may not have."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vapo.errors import UserError
from vapo.system.files import read_inside
from vapo.tracking.records import is_run_id

JOURNAL_NAME = "journal.jsonl"
SENT_NAME = "sent.json"
TARGET_NAME = "target.json"
REFUSED_NAME = "refused.jsonl"
FOLDER = "files"
"""It has the contents of artifacts, each under a random name of 32 hexadecimal digits."""
NAMES = (JOURNAL_NAME, SENT_NAME, f".{SENT_NAME}", TARGET_NAME, REFUSED_NAME, "lock")
_MAX_TARGET_BYTES = 2**20


def check_own_files(folder: Path) -> None:
    """Raises: UserError: a link, or what is no file, stands where the journal has a file."""
    for name in (FOLDER, *NAMES):
        path = folder / name
        is_right = path.is_dir() if name == FOLDER else path.is_file()
        if os.path.lexists(path) and (path.is_symlink() or not is_right):
            raise UserError(
                f"{path} is a link, or of another kind than a run writes: the records of a run "
                "lie in its own folder; put there what it leads to, or remove it"
            )


def read_target(folder: Path) -> dict[str, Any] | None:
    """What `Journal.bind` noted: `tracking_uri` and `mlflow_run_id`; None if nothing readable."""
    try:
        target = json.loads(read_inside(folder, TARGET_NAME, _MAX_TARGET_BYTES) or b"")
        is_ours = isinstance(target["tracking_uri"], str) and is_run_id(target["mlflow_run_id"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return target if is_ours else None


def set_aside_others(folder: Path, run_id: str | None, note: Callable[[str], None]) -> None:
    """Rename the folder if another run's journal is in it, so that its records are kept."""
    target = read_target(folder)
    if target is None or target["mlflow_run_id"] == run_id:
        return
    other = folder.with_name(f"{folder.name}-{target['mlflow_run_id'][:12]}")
    if not os.path.lexists(other):
        folder.rename(other)
        note(f"tracking: the records of an earlier run in {folder} are now in {other}")


def cannot_write_journal(folder: Path | None, error: OSError) -> UserError:
    return UserError(
        f"cannot write the run's records in {folder}: {error.strerror}; make room, or choose "
        "another output_dir or export_dir"
    )
