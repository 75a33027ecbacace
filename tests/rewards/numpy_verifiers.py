"""A user's verifier functions beside an import that takes a while."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def numpy_bool(response_text: str, answer: str, metadata: dict[str, Any]) -> Any:
    return np.array([response_text == answer]).all()


def imported_modules(response_text: str, answer: str, metadata: dict[str, Any]) -> bool:
    return response_text in sys.modules
