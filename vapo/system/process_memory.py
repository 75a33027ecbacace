"""What others can read of this process: the variables and arguments that it was started with.

On Linux, /proc/PID/environ and /proc/PID/cmdline show the memory in which a process was given them.
A user's code could read there what is withheld from it: of the trainer that started it, and of the
sweep that started the trainer. So the secrets are overwritten in that memory once Python has copies
of its own. The variables get other places, so that `os.environ`, libraries and the processes that
this one starts have them as before.

It is no protection from a program that reads another one's memory (root, or a debugger of the same
user), nor of other processes with the same variables, as the shell that exported them.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from vapo.errors.secret_rule import is_secret_variable, secrets_within

_FIRST_FIELD = 3
_ARGUMENTS, _VARIABLES = 48, 50
"""Places of their addresses in /proc/PID/stat, each before that of the end: proc_pid_stat(5)."""


def overwrite_secrets() -> None:
    """Overwrite this process's secrets in the memory that /proc shows, on Linux; again: nothing.

    Other threads must not change variables meanwhile.
    """
    if sys.platform != "linux":
        return
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:  # there is no /proc, which then shows nothing
        return
    numbers = stat.rpartition(")")[2].split()
    for field, secret_parts in ((_VARIABLES, _of_variable), (_ARGUMENTS, _of_argument)):
        start, end = (int(numbers[field + place - _FIRST_FIELD]) for place in (0, 1))
        if 0 < start < end:  # 0: the kernel does not tell
            _overwrite(start, end - start, secret_parts)


def _overwrite(start: int, size: int, secret_parts: Callable[[bytes], list[slice]]) -> None:
    place = start
    for text in ctypes.string_at(start, size).split(b"\0"):
        for part in secret_parts(text):
            ctypes.memset(place + part.start, ord("*"), part.stop - part.start)
        place += len(text) + 1


def _of_variable(text: bytes) -> list[slice]:
    """The value, where it is secret; the variable has another place in memory from now on."""
    name, equals, content = text.partition(b"=")
    key = os.fsdecode(name)
    if not (equals and content and is_secret_variable(key, os.fsdecode(content))):
        return []
    if key in os.environ:
        os.environ[key] = os.environ[key]
    return [slice(len(name) + 1, len(text))]


def _of_argument(text: bytes) -> list[slice]:
    parts = [re.escape(os.fsencode(secret)) for secret in secrets_within(os.fsdecode(text))]
    return [slice(*match.span()) for part in parts for match in re.finditer(part, text)]
