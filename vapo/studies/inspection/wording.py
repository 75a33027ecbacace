"""Sentences and names as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath


def sentence(text: str) -> str:
    """With a capital and a full stop.

    >>> sentence("each value (1 pair)")
    'Each value (1 pair).'
    """
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def short_names(files: Sequence[str]) -> dict[str, str]:
    """The ends of paths that tell them apart.

    >>> short_names(["runs/a/x.jsonl", "runs/b/x.jsonl"])
    {'runs/a/x.jsonl': 'a/x.jsonl', 'runs/b/x.jsonl': 'b/x.jsonl'}
    """
    paths = [PurePath(file) for file in files]
    for num in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = [str(PurePath(*path.parts[-num:])) for path in paths]
        if len(set(names)) == len(set(files)):
            return dict(zip(files, names, strict=True))
    return {file: file for file in files}
