"""Where a command may write a model's folder, and how: whole, or not at all. Imports no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vapo.errors import UserError
from vapo.system.files import sync, why_not_writable
from vapo.system.made_folders import missing_folders

_ASIDE = ".saving"
"""The folder in which a model lies until it is whole. A command that was killed leaves it."""


def check_new_folder(
    folder: str | Path, *, key: str = "", sources: Iterable[str] = (), may_have: Iterable[str] = ()
) -> None:
    """Check that a model's folder can be written, and that nothing is lost by it.

    Args:
        key: the config's key that names the folder; errors begin with it.
        sources: what the command reads: the folder is none of these and lies in none of them,
            by whatever path it is named.
        may_have: names of what an earlier try of the command may have left in the folder.

    Raises: UserError: it is the folder of a source, in one, not empty, or cannot be written.
    """
    path = Path(folder).expanduser().absolute()
    label = f"{key} {folder}" if key else str(folder)
    if reason := why_not_writable(path):
        raise UserError(f"{label}: cannot write there: {reason}")
    real = path.resolve()
    for source in sources:
        source_path = Path(source).expanduser()
        if source_path.exists() and (source_path := source_path.resolve()) in (real, *real.parents):
            relation = "is the folder" if source_path == real else "lies in the folder"
            raise UserError(f"{label} {relation} {source}, which is read: give another folder")
    allowed_names = {_ASIDE, *may_have}
    other_names = sorted(set(os.listdir(path)) - allowed_names) if path.is_dir() else []
    if other_names:
        raise UserError(
            f"{label} is not empty (it has {other_names[0]}): give a new folder, or move this one "
            "away"
        )


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, whose files appear in `final` once the block has ended.

    Files of the same names are replaced. If the block fails, nothing of it is left. It lies in
    `final`, which may be on a disk of its own. `config.json` comes last: without it a folder is no
    model's.
    """
    new_folders = missing_folders(final)
    aside = final / _ASIDE
    shutil.rmtree(aside, ignore_errors=True)
    is_whole = False
    try:
        aside.mkdir(parents=True)
        yield aside
        for file in sorted(aside.iterdir(), key=lambda file: (file.name == "config.json", file)):
            file.replace(final / file.name)
        sync(final)
        is_whole = True
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        for folder in () if is_whole else new_folders:
            with suppress(OSError):  # something else has been written there
                folder.rmdir()
