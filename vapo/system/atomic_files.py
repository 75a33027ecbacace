"""Files that are whole or not there, also after a power cut."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """`write` a file aside, then put it in the place of `path`."""
    aside = path.with_name(f".{path.name}.new")
    try:
        write(aside)
        sync(aside)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def point_link(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`, in one step also if it is one already."""
    aside = link.with_name(f".{link.name}.new")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    aside.replace(link)
    sync(link.parent)


def replace_folder(aside: Path, final: Path) -> None:
    """Put a folder in its place; one that is there already is removed afterwards."""
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        final.rename(old)
    aside.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
