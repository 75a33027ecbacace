"""A sweep's folder as what a report is of: its parent run, and the store that has its runs."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path

from vapo.errors import UserError
from vapo.sweep.folders import SWEEP_RECORD
from vapo.tracking.journal import read_target


@dataclass(frozen=True)
class SweepFolder:
    path: Path
    parent_run_id: str
    tracking_uri: str


def read_sweep_folder(folder: Path, tracking_uri: str | None) -> SweepFolder:
    """The sweep of a folder; a `tracking_uri` of None is the one that its runs recorded.

    Raises: UserError that names the folder and what it lacks, with the nearest that has it.
    """
    path = folder.expanduser().absolute()
    record = path / SWEEP_RECORD
    if not record.is_file():
        what = "is not a folder" if path.exists() else "there is no such folder"
        if path.is_dir():
            what = f"there is no {SWEEP_RECORD} in it, so it is not the folder of a sweep"
        raise UserError(f"SWEEP_FOLDER {path}: {what}{_hint(path)}")
    try:
        parent_run_id = str(json.loads(record.read_text())["parent_run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"SWEEP_FOLDER: {record} is not the record of a sweep: give the id that `vapo sweep` "
            "printed, as --sweep ID"
        ) from None
    # where the latest of its runs were recorded, without credentials
    found = sorted(path.glob("runs/*/fit/*/tracking"), key=lambda one: one.stat().st_mtime)
    targets = (read_target(tracking) for tracking in reversed(found))
    recorded = (str(target["tracking_uri"]) for target in targets if target)
    if (uri := tracking_uri or next(recorded, None)) is None:
        raise UserError(
            f"SWEEP_FOLDER: no run in {path / 'runs'} says where it was recorded: give "
            "--tracking_uri"
        )
    return SweepFolder(path, parent_run_id, uri)


def _hint(path: Path) -> str:
    """Sweeps near a path that is none: the one around it, those in it or beside it."""
    around = next((one for one in path.parents if (one / SWEEP_RECORD).is_file()), None)
    if around is not None:
        return f"; the sweep around it is {around}"
    folder = path if path.is_dir() else path.parent
    names = sorted(record.parent.name for record in folder.glob(f"*/{SWEEP_RECORD}"))
    if folder != path:
        names = difflib.get_close_matches(path.name, names) or names
    if names:
        return f"; sweeps in {folder}: {', '.join(names)}"
    return "; `vapo sweep` prints its folder, and --sweep takes the id of its parent run"
