"""Reading a line of JSON that a user has written."""

from __future__ import annotations

import json
from typing import Any


def read_line(text: str) -> Any:
    """The value of one line; a key that an object has twice is an error, not a silent choice.

    Raises: ValueError: it is not JSON, or has such a key; RecursionError: nested too deep.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r:.80} is there twice")
        found[key] = value
    return found
