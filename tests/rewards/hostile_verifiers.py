"""A user's verifier functions, good and bad. Run in worker processes only."""

from __future__ import annotations

import ctypes
import os
import re
import stat
import subprocess
import sys
import threading
import time
from typing import Any

Metadata = dict[str, Any]


def last_word(response_text: str, answer: str, metadata: Metadata) -> bool:
    return response_text.split()[-1:] == [answer]


def own_reward(response_text: str, answer: str, metadata: Metadata) -> tuple[bool, float]:
    return response_text == answer, metadata["bonus"] + 0.25


def is_the_answer(response_text: str, answer: str, metadata: Metadata) -> tuple[bool, float]:
    """The reward says how long the text is, 0.5 for each character."""
    return response_text == answer, len(response_text) / 2


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
        "huge reward": (True, -1e308),
        "a dict": {"score": 1.0},
        "a list": [1.0],
        "infinite number": float("-inf"),
        "none": None,
        "text": "yes",
        "wrong pair": (1.0, True),
    }
    return values.get(response_text, response_text == answer)


def process_id_is(response_text: str, answer: str, metadata: Metadata) -> tuple[bool, float]:
    return True, float(os.getpid())


def leaves_a_child(response_text: str, answer: str, metadata: Metadata) -> bool:
    """Starts a process of its own, writes its id to the file that the response names, hangs."""
    child = subprocess.Popen(["sleep", "600"])
    with open(response_text, "w") as file:
        file.write(str(child.pid))
    time.sleep(600)
    return True


def leaves_a_daemon(response_text: str, answer: str, metadata: Metadata) -> bool:
    """Starts a process that leaves group and session, then does what the response says."""
    path, _, told = response_text.partition("|")
    command = f"setsid sleep 600 & echo $! > '{path}'"
    subprocess.Popen(["sh", "-c", command], env={"PATH": os.environ["PATH"]}).wait()
    if told == "abort":
        os.abort()
    if told == "hang":
        time.sleep(600)
    return True


def tells_a_variable(response_text: str, answer: str, metadata: Metadata) -> bool:
    """Raises with the value of the variable that the response names."""
    raise ValueError(f"refused: {os.environ.get(response_text, 'it is not there')}")


GARBAGE = {
    "number": b"4\n",
    "framed number": b"\0\0\0\x014",
    "verdict": b'{"is_correct": true, "reward": null, "extracted": null}\n',
    "text": b"noise",
    "nesting": b"[" * 50_000 + b"\n",
    "no end": b"7" * 150_000,
    "beginning": b"\0\0\x10\0abc",
}


def writes_into_sockets(response_text: str, answer: str, metadata: Metadata) -> bool:
    """Writes the garbage of the name that the response has into every socket; may hang then."""
    name, _, told = response_text.partition("|")
    if name in GARBAGE:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    os.write(descriptor, GARBAGE[name])
            except OSError:
                continue
    if told == "hang":
        time.sleep(600)
    return response_text == answer


def writes_into_low_descriptors(response_text: str, answer: str, metadata: Metadata) -> bool:
    """What code does that takes 3 for its own file."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"noise")
            os.close(descriptor)
        except OSError:
            continue
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


def dies_later(response_text: str, answer: str, metadata: Metadata) -> bool:
    """A number: it answers, and after so many seconds its process dies."""
    if response_text == "crash":
        os.abort()
    if response_text == "nap":
        time.sleep(0.5)
    elif response_text != "42":
        threading.Timer(float(response_text), os._exit, (0,)).start()
    return True


NOT_A_FUNCTION = 3
