"""Check where a command may write a model's folder, and write it whole or not at all. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vapo.errors import UserError
from vapo.files.made_folders import missing_folders
from vapo.files.whole_files import sync, why_not_writable

_ASIDE = ".saving"
"""The folder in which a model lies until it is complete. A killed command leaves it behind."""


def check_new_folder(
    folder: str | Path, *, key: str = "", sources: Iterable[str] = (), may_have: Iterable[str] = ()
) -> None:
    """Check that a model's folder can be written, and that nothing is lost by it.

    Args:
        key: the config's key that names the folder; errors begin with it.
        sources: paths that the command reads. The folder must not be one of them or lie in one,
            also by way of links.
        may_have: names of entries that an earlier try of the command may have left in the folder.

    Raises: UserError: the folder is a source, lies in one, is not empty, or cannot be written.
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
    """Yield a folder to write into, whose files move to `final` when the block ends.

    Files of the same names are replaced. If the block fails, nothing that it wrote stays. The
    yielded folder lies in `final`, because that may be on another disk. `config.json` moves last:
    a folder without it is not a model's.
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
