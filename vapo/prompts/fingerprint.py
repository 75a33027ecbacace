"""A short digest of a model folder, cheap at any size: it changes when the folder is rewritten."""

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
    """12 hex digits of a folder's configs and weights; None where there is no such folder.

    Of each file: its name, size, first and last MiB. Training moves every weight, so the ends
    of a file change with it. A folder of several critics has a folder of each.
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
    """12 hex digits: equal exactly when texts and answers are, in the same order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.text, prompt.answer]).encode() + b"\n")
    return digest.hexdigest()[:12]
