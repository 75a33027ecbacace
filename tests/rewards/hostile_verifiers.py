"""A user's verifier functions, good and bad. Run in worker processes only."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from typing import Any

import numpy as np

Metadata = dict[str, Any]


def last_word(response_text: str, answer: str, metadata: Metadata) -> bool:
    return response_text.split()[-1:] == [answer]


def own_reward(response_text: str, answer: str, metadata: Metadata) -> tuple[bool, float]:
    return response_text == answer, metadata["bonus"] + 0.25


def numpy_bool(response_text: str, answer: str, metadata: Metadata) -> Any:
    return np.array([response_text == answer]).all()


def as_told(response_text: str, answer: str, metadata: Metadata) -> Any:
    """Does what the response says."""
    if response_text == "hang":
        time.sleep(600)
    if response_text == "hang in C, with signals blocked":
        libc = ctypes.PyDLL(None)  # PyDLL: holds the interpreter lock meanwhile
        libc.sleep(600)
    if response_text == "regex bomb":
        re.match(r"(a+)+$", "a" * 60 + "!")
    if response_text == "abort":
        os.abort()
    if response_text == "segfault":
        ctypes.string_at(0)
    if response_text == "exit":
        sys.exit(0)
    if response_text == "exit at once":
        os._exit(0)
    if response_text == "raise":
        raise KeyError("boom \ud800")
    if response_text == "memory":
        return len(bytearray(3 * 1024**3)) > 0  # untouched pages: costs no memory
    if response_text == "recursion":
        return as_told(response_text, answer, metadata)
    if response_text == "print":
        print("noise")
        os.write(1, b"noise")
    values = {
        "nan": float("nan"),
        "nan reward": (True, float("nan")),
        "infinite reward": (True, float("inf")),
        "number": 0.5,
        "none": None,
        "text": "yes",
        "wrong pair": (1.0, True),
    }
    return values.get(response_text, response_text == answer)


def imported_modules(response_text: str, answer: str, metadata: Metadata) -> bool:
    return response_text in sys.modules


def process_id_is(response_text: str, answer: str, metadata: Metadata) -> tuple[bool, float]:
    return True, float(os.getpid())


def leaves_a_child(response_text: str, answer: str, metadata: Metadata) -> bool:
    """Starts a process of its own, writes its id to the file that the response names, hangs."""
    child = subprocess.Popen(["sleep", "600"])
    with open(response_text, "w") as file:
        file.write(str(child.pid))
    time.sleep(600)
    return True


def hangs(response_text: str, answer: str, metadata: Metadata) -> bool:
    """Writes its process id to the file that the response names."""
    with open(response_text, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
    return True


def naps(response_text: str, answer: str, metadata: Metadata) -> bool:
    time.sleep(float(response_text))
    return True


NOT_A_FUNCTION = 3
