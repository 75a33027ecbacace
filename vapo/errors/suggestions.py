"""Finds the known name, or the existing path, that a mistyped one most likely means."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

_MOST_NAMES = 10_000  # looked at in one folder, and in all folders of one


def did_you_mean(name: str, known_names: Iterable[str], *, quote: str = "'") -> str:
    """Return `; did you mean 'NAME'?` with the most similar known name, or "" if none is similar.

    >>> did_you_mean("fitt", ["fit", "sweep"]), did_you_mean("serve", ["fit"])
    ("; did you mean 'fit'?", '')
    """
    nearest = nearest_name(name, known_names)
    return "" if nearest is None else f"; did you mean {quote}{nearest}{quote}?"


def suggest_known(name: str, known_names: list[str]) -> str:
    """Suggest a fix for a misspelt name: the nearest known name, then all known names."""
    similar_name = nearest_name(name, known_names, cutoff=0.7)  # solution is not question
    hint = f"did you mean {similar_name!r}? " if similar_name else ""
    return f"{hint}known: {', '.join(known_names)}"


def nearest_name(name: str, known_names: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the most similar known name, or None if no similarity reaches `cutoff` (0 to 1)."""
    return next(iter(nearest_names(name, known_names, max_names=1, cutoff=cutoff)), None)


def nearest_names(
    name: str, known_names: Iterable[str], *, max_names: int = 3, cutoff: float = 0.6
) -> list[str]:
    """Return up to `max_names` known names of similarity `cutoff` or more, nearest first."""
    return difflib.get_close_matches(name, list(known_names), n=max_names, cutoff=cutoff)


def nearest_path(path: Path) -> str:
    """Return `; did you mean ...?` with an existing path that is similar to this one, or "".

    Each missing part is replaced by the most similar name in its folder. If no name there is
    similar to the last part, the folders beside it are searched.
    """
    parts = path.parts[1:] if path.anchor else path.parts
    existing = Path(path.anchor)
    near: str | Path | None
    for index, part in enumerate(parts):
        if os.path.exists(existing / part):  # False, too, where a name is too long
            existing /= part
            continue
        near = nearest_name(part, _names(existing), cutoff=0.7)
        if near is None and index == len(parts) - 1:
            near = _most_alike_below(part, existing)
        if near is None:
            return ""
        existing /= near
    return "" if existing == path else f"; did you mean {existing}?"


def _names(folder: Path) -> list[str]:
    names: list[str] = []
    with suppress(OSError):  # no folder, or one that may not be read: nothing to suggest
        names = [other.name for other in islice(folder.iterdir(), _MOST_NAMES)]
    return names


def _most_alike_below(name: str, folder: Path) -> Path | None:
    """Return the path, relative to `folder`, of a similar name in one of its subfolders, or None.

    The similarity must be higher than for a name in `folder` itself.
    """
    below = (
        (beside, inner)
        for beside in sorted(_names(folder))
        if not beside.startswith(".") and os.path.isdir(folder / beside)
        for inner in sorted(_names(folder / beside))
    )
    places = {inner: Path(beside, inner) for beside, inner in islice(below, _MOST_NAMES)}
    near = nearest_name(name, list(places), cutoff=0.85)
    return None if near is None else places[near]
