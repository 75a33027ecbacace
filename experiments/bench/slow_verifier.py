"""A verifier that takes half a second a response, for `judging.py`."""

from __future__ import annotations

import time
from typing import Any


def judge(response_text: str, answer: str, metadata: dict[str, Any]) -> bool:
    time.sleep(0.5)
    return response_text == answer
