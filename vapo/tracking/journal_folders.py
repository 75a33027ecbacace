"""The folder of a journal: its files' names, their checks, and the reading of lines."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vapo.errors import UserError
from vapo.files.whole_files import open_inside, read_inside
from vapo.tracking.records import is_run_id

JOURNAL_NAME = "journal.jsonl"
SENT_NAME = "sent.json"
TARGET_NAME = "target.json"
REFUSED_NAME = "refused.jsonl"
ASIDE_NAME = f".{SENT_NAME}"
NAMES = (JOURNAL_NAME, SENT_NAME, ASIDE_NAME, TARGET_NAME, REFUSED_NAME, "lock")
CONTENTS_FOLDER = "files"
"""The folder for the contents of artifacts, each in a file named by 32 random hex digits."""
PAYLOAD = re.compile(rf"{CONTENTS_FOLDER}/[0-9a-f]{{32}}")
MAX_LINE_BYTES = 2**26
_MAX_TARGET_BYTES = 2**20


def check_own_files(folder: Path) -> None:
    """Check that the journal's files, if they exist, are regular files and not links.

    Raises: UserError: one of them is a link or of another kind.
    """
    for name in (CONTENTS_FOLDER, *NAMES):
        path = folder / name
        is_right = path.is_dir() if name == CONTENTS_FOLDER else path.is_file()
        if os.path.lexists(path) and (path.is_symlink() or not is_right):
            raise UserError(
                f"{path} is a link, or of another kind than a run writes: the records of a run "
                "lie in its own folder; put there what it leads to, or remove it"
            )


def read_target(folder: Path) -> dict[str, Any] | None:
    """Return the `tracking_uri` and `mlflow_run_id` in target.json, or None if unreadable."""
    try:
        target = json.loads(read_inside(folder, TARGET_NAME, _MAX_TARGET_BYTES) or b"")
        is_ours = isinstance(target["tracking_uri"], str) and is_run_id(target["mlflow_run_id"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return target if is_ours else None


def set_aside_others(folder: Path, run_id: str | None, note: Callable[[str], None]) -> None:
    """Rename the folder if it has another run's journal, so that its records are kept."""
    target = read_target(folder)
    if target is None or target["mlflow_run_id"] == run_id:
        return
    new_path = folder.with_name(f"{folder.name}-{target['mlflow_run_id'][:12]}")
    if not os.path.lexists(new_path):
        folder.rename(new_path)
        note(f"tracking: the records of an earlier run in {folder} are now in {new_path}")


def cannot_write_journal(folder: Path | None, error: OSError) -> UserError:
    return UserError(
        f"cannot write the run's records in {folder}: {error.strerror}; make room, or choose "
        "another output_dir or export_dir"
    )


def lines_in(folder: Path, start: int = 0) -> Iterator[bytes]:
    """Yield the complete lines of a journal from byte `start` on.

    Raises: UserError: a line is longer than a run writes.
    """
    with open_inside(folder, JOURNAL_NAME, "rb") as file:
        file.seek(start)
        while line := file.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES:
                raise UserError(
                    f"{folder / JOURNAL_NAME} has a line longer than {MAX_LINE_BYTES} bytes, "
                    "which no run writes: remove the line"
                )
            if not line.endswith(b"\n"):
                return  # its writer may finish it now: the rest would be read as a line
            yield line
