"""A user's environments, good and bad. Run in the processes of environments only."""

from __future__ import annotations

import ctypes
import os
import random
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.rewards.hostile_verifiers import GARBAGE

Row = dict[str, Any]
Answer = tuple[Any, Any]

IMPORTED_BY = os.getpid()


class Counts:
    """Ends after so many turns; each is worth its number."""

    def __init__(self, turns: int = 3, nap_s: float = 0.0) -> None:
        self.turns = turns
        self.nap_s = nap_s
        self.seen: list[str] = []

    def reset(self, row: Row) -> str:
        return f"count {row['prompt']}"

    def step(self, text: str) -> Answer:
        time.sleep(self.nap_s)
        self.seen.append(text)
        is_over = len(self.seen) == self.turns
        return None if is_over else "|".join(self.seen), len(self.seen)


class Silent:
    def reset(self, row: Row) -> None:
        return None

    def step(self, text: str) -> Answer:
        return None, np.float32(0.5)


class AsTold:
    """Does what the text says; the same of `row["prompt"]` in reset."""

    def reset(self, row: Row) -> Any:
        do(row["prompt"])
        return RESETS.get(row["prompt"], "begun")

    def step(self, text: str) -> Any:
        do(text)
        return STEPS[text]() if text in STEPS else (f"{text} done", 1.0)


def do(told: str) -> None:
    word, _, rest = told.partition(" ")
    if word in ACTIONS:
        ACTIONS[word](rest)


def _loop(rest: str) -> None:
    while True:
        pass


def _hang_in_c(rest: str) -> None:
    ctypes.PyDLL(None).sleep(600)  # PyDLL: holds the interpreter lock meanwhile


def _raise(rest: str) -> None:
    raise ValueError(f"no {rest}\ud800")


def _print(rest: str) -> None:
    print("noise")
    os.write(1, b"noise\n")
    os.write(2, b"noise\n")


def _write_into_channel(name: str) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, GARBAGE[name])
        except OSError:
            continue


def _write_without_end(rest: str) -> None:
    channel = max(
        number
        for number in map(int, os.listdir("/proc/self/fd"))
        if os.path.exists(f"/proc/self/fd/{number}") and stat.S_ISSOCK(os.fstat(number).st_mode)
    )
    while True:
        os.write(channel, b"7" * int(rest))
        time.sleep(0.05)


def _stop_itself(rest: str) -> None:
    os.kill(os.getpid(), 19)


def _kill_host(rest: str) -> None:
    os.kill(os.getppid(), 9)
    time.sleep(600)


def _stop_host(rest: str) -> None:
    os.kill(os.getppid(), 19)


def _start_daemon(file: str) -> None:
    """It has left the process group and the session; its id goes into the file."""
    command = f"setsid sleep 600 & echo $! > '{file}'"
    subprocess.Popen(["sh", "-c", command], env={"PATH": os.environ["PATH"]}).wait()


def _fork_and_fork(folder: str) -> None:
    """Forty processes in a tree, some orphans, which write their ids."""
    for _ in range(3):
        os.fork()
    for _ in range(5):
        if os.fork() == 0:
            Path(folder, str(os.getpid())).touch()
            time.sleep(600)
    Path(folder, str(os.getpid())).touch()
    if os.getppid() != IMPORTED_BY and random.random() < 0.5:
        os._exit(0)
    time.sleep(600)


ACTIONS = {
    "hang": lambda rest: time.sleep(600),
    "nap": lambda rest: time.sleep(float(rest)),
    "loop": _loop,
    "hang-in-C": _hang_in_c,
    "exit-at-once": lambda rest: os._exit(3),
    "exit": lambda rest: sys.exit("over"),
    "abort": lambda rest: os.abort(),
    "segfault": lambda rest: ctypes.string_at(0),
    "raise": _raise,
    "memory": lambda rest: bytearray(3 * 1024**3),  # untouched pages: costs no memory
    "print": _print,
    "channel": _write_into_channel,
    "endless": _write_without_end,
    "stop": _stop_itself,
    "kill-host": _kill_host,
    "stop-host": _stop_host,
    "daemon": _start_daemon,
    "forks": _fork_and_fork,
}
RESETS = {"number": 3, "long": "x" * 1_000_000}
STEPS = {
    "1 MB": lambda: ("x" * 1_000_000, 0.0),
    "100 MB": lambda: ("x" * 100_000_000, 0.0),
    "longest": lambda: ("\U0001f40d" * 2**18, 0.0),
    "control": lambda: ("a\x00\x1b[2J\u2028\r\n\ud800\x07b", 0.0),
    "nan": lambda: ("on", float("nan")),
    "infinite": lambda: ("on", float("inf")),
    "huge": lambda: ("on", 1e308),
    "number": lambda: (3, 0.0),
    "bytes": lambda: (b"on", 0.0),
    "text reward": lambda: ("on", "0.5"),
    "no reward": lambda: ("on", None),
    "alone": lambda: "on",
    "three": lambda: ("on", 0.0, {}),
    "nothing": lambda: None,
    "bool": lambda: ("on", True),
    "numpy": lambda: ("on", np.float64(0.25)),
    "list": lambda: ["on", 1],
    "ends": lambda: (None, -1),
    "random": lambda: (f"{random.random()} {np.random.rand()}", 0.0),
    "process": lambda: (f"{os.getpid()} {IMPORTED_BY} {os.getppid()}", 0.0),
    "variables": lambda: (" ".join(os.environ), 0.0),
}


class Closes:
    """Writes into the row's file that it was closed, and by which process; may then hang."""

    def reset(self, row: Row) -> None:
        self.row = row

    def step(self, text: str) -> Answer:
        return (None if text == "end" else "on"), 0.0

    def close(self) -> None:
        with open(self.row["file"], "a") as file:
            file.write(f"closed {os.getpid()}")
        do(self.row["prompt"])


class NoStep:
    def reset(self, row: Row) -> None:
        return None


class ResetTakesNothing:
    def reset(self) -> None:
        return None

    def step(self, text: str) -> Answer:
        return None, 0.0


class FailsToBegin:
    def __init__(self) -> None:
        raise RuntimeError("no licence")

    def reset(self, row: Row) -> None:
        return None

    def step(self, text: str) -> Answer:
        return None, 0.0


def made_by_a_function(turns: int) -> Counts:
    return Counts(turns)


class CountsOrDies(Counts):
    """As `Counts`; where the row says so its process dies in the first step."""

    def reset(self, row: Row) -> str:
        self.fails = row["fails"]
        return "a"

    def step(self, text: str) -> Answer:
        if self.fails:
            os._exit(1)
        return super().step(text)


class TellsItsKey:
    """Raises with its key in the message, or with a variable; says which variables it has."""

    def __init__(self, key: str = "", url: str = "") -> None:
        self.key, self.url = key, url

    def reset(self, row: Row) -> str:
        return " ".join(sorted(os.environ))

    def step(self, text: str) -> Answer:
        before, _, what = text.rpartition(" ")
        told = {"key": self.key, "url": self.url, "password": "pa55/word"}
        if what == "answer":
            return None, {"key": self.key}
        raise ValueError(f"{before} {told.get(what) or os.environ[what]}, refused")
