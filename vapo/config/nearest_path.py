"""What a path that leads nowhere most likely means."""

from __future__ import annotations

import difflib
import os
from contextlib import suppress
from pathlib import Path


def nearest_path(path: Path) -> str:
    """`; did you mean ...?`, each missing part replaced by the most alike beside it; or nothing."""
    found = Path(path.anchor)
    for part in path.parts[1:] if path.anchor else path.parts:
        if os.path.exists(found / part):  # False, too, where a name is too long
            found /= part
            continue
        names: list[str] = []
        with suppress(OSError):  # no folder, or one that may not be read: nothing to suggest
            names = [other.name for other in found.iterdir()]
        close = difflib.get_close_matches(part, names, n=1, cutoff=0.7)
        if not close:
            return ""
        found /= close[0]
    return f"; did you mean {found}?"
