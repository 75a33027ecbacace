"""Overwrites secrets in this process's variables and arguments where other processes can read them.

On Linux, /proc/PID/environ and /proc/PID/cmdline show the memory in which a process got its
variables and arguments. There a user's code could read secrets that are withheld from it: in the
trainer that started it, and in the sweep that started the trainer. So the secrets are overwritten
in that memory once Python has copies of its own. The variables move to other places in memory, so
that `os.environ`, libraries and child processes have them as before.

This does not protect from a program that reads another one's memory (root, or a debugger of the
same user). It does not protect other processes with the same variables, such as the shell that
exported them.
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
"""Indices of their start addresses in /proc/PID/stat, each before its end: proc_pid_stat(5)."""


def overwrite_secrets() -> None:
    """Overwrite secrets in the memory of this process that /proc shows. It acts on Linux only.

    These are the values of secret environment variables (`is_secret_variable`), and the parts of
    the command line that look like a password or token. Python's copies, such as `os.environ`, keep
    them. A second call changes nothing. Other threads must not change environment variables
    meanwhile.
    """
    if sys.platform != "linux":
        return
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:  # there is no /proc, which then shows nothing
        return
    numbers = stat.rpartition(")")[2].split()
    for field, secret_parts in ((_VARIABLES, _variable_secrets), (_ARGUMENTS, _argument_secrets)):
        start, end = (int(numbers[field + place - _FIRST_FIELD]) for place in (0, 1))
        if 0 < start < end:  # 0: the kernel does not tell
            _overwrite(start, end - start, secret_parts)


def _overwrite(start: int, size: int, secret_parts: Callable[[bytes], list[slice]]) -> None:
    place = start
    for text in ctypes.string_at(start, size).split(b"\0"):
        for part in secret_parts(text):
            ctypes.memset(place + part.start, ord("*"), part.stop - part.start)
        place += len(text) + 1


def _variable_secrets(text: bytes) -> list[slice]:
    """Return the slice of `NAME=VALUE` that has the value if it is secret; else an empty list.

    A secret variable is also set again, so that it has other memory than what is overwritten.
    """
    name, equals, content = text.partition(b"=")
    key = os.fsdecode(name)
    if not (equals and content and is_secret_variable(key, os.fsdecode(content))):
        return []
    if key in os.environ:
        os.environ[key] = os.environ[key]
    return [slice(len(name) + 1, len(text))]


def _argument_secrets(text: bytes) -> list[slice]:
    parts = [re.escape(os.fsencode(secret)) for secret in secrets_within(os.fsdecode(text))]
    return [slice(*match.span()) for part in parts for match in re.finditer(part, text)]
