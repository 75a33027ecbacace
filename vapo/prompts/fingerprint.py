"""Computes short digests of model folders, which are cheap at any size, and of prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vapo.types import Prompt

_END_BYTES = 1 << 20


def fingerprint(folder: str | Path) -> str | None:
    """Return 12 hex digits for a folder's configs and weights, or None if there is no such folder.

    These are the files with the endings .json and .safetensors; others have no influence.
    Each file counts by its name, its size and its first and last MiB. Training changes every
    weight, so the ends of a file change with it. The folders of several critics, named by numbers,
    are included.
    """
    path = Path(folder)
    if not path.is_dir():
        return None
    digest = hashlib.sha256()
    patterns = [place + kind for place in ("", "[0-9]*/") for kind in ("*.safetensors", "*.json")]
    for file in sorted(match for pattern in patterns for match in path.glob(pattern)):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path).as_posix()} {size}\0".encode())
        with file.open("rb") as content:
            digest.update(content.read(_END_BYTES))
            if size > _END_BYTES:
                content.seek(max(size - _END_BYTES, _END_BYTES))
                digest.update(content.read())
    return digest.hexdigest()[:12]


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Return 12 hex digits that depend on the prompts' texts and answers, in this order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.text, prompt.answer]).encode() + b"\n")
    return digest.hexdigest()[:12]
