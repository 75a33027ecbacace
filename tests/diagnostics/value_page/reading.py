"""Reads a page's data back, as its script does."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import torch


def page_json(page: str) -> dict[str, Any]:
    """What a browser would read: the data element ends at the first `</script`."""
    start = page.index('<script type="application/json" id="data">')
    text = page[start:].partition(">")[2].partition("</script")[0]
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def unpacked(packed: str | float, num: int) -> torch.Tensor:
    if isinstance(packed, float):
        return torch.full((num,), packed)
    return torch.from_numpy(np.frombuffer(base64.b64decode(packed), "<f4").copy())


def token_ids(response: dict[str, Any]) -> list[int]:
    return [int(i) for i in np.frombuffer(base64.b64decode(response["ids"]), "<i4")]
