"""Makes the folders of a command, and removes them again if its start is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from vapo.errors import UserError


def missing_folders(folder: Path) -> list[Path]:
    """Return the folder and its parents that do not exist, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def make_folders(folder: Path) -> list[Path]:
    """Make a folder with its missing parents; return the new folders, innermost first."""
    missing = missing_folders(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return missing


@contextmanager
def taken_back_if_refused(
    new_folders: Sequence[Path], first_files: Collection[str] = ()
) -> Iterator[None]:
    """Remove folders that this process made, if a `UserError` ends the block before any work.

    Args:
        new_folders: the folders, innermost first. The outer ones are removed only if they are
            empty.
        first_files: names of files in the innermost folder that count as no work.
    """
    try:
        yield
    except UserError:
        if new_folders and all(
            _holds_no_work(entry, first_files) for entry in _entries(new_folders[0])
        ):
            for entry in _entries(new_folders[0]):
                _remove(entry)
            for folder in new_folders:
                _remove(folder)
        raise


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _holds_no_work(entry: Path, first_files: Collection[str]) -> bool:
    if entry.is_dir() and not entry.is_symlink():
        return not _entries(entry)
    return entry.name in first_files


def _remove(path: Path) -> None:
    """Remove a file or an empty folder. A folder that is not empty stays."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
