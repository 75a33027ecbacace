"""Can a folder be written? Asked before the work whose result goes into it."""

from __future__ import annotations

import os
from pathlib import Path


def why_not_writable(folder: Path) -> str | None:
    """Why neither the folder can be written nor made; None where nothing speaks against it.

    Nothing is made. A disk that is full, or that refuses what its permissions allow, is not seen.
    """
    around = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not around.is_dir():
        return f"{around} is not a folder"
    if not os.access(around, os.W_OK | os.X_OK):
        return f"{around} may not be written by this user"
    return None
