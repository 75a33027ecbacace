"""Starts Python processes that do not import modules from the current folder first.

With `python -m` and `python -c` the current folder comes before Python's own library. A file of the
user's that is called random.py or mlflow.py would be executed in the place of the library. The
option -P keeps the folder out, and the variable PYTHONSAFEPATH does the same for the processes that
a library starts: MLflow's server, the ranks of Lightning, the workers of vLLM. A user's own
functions are found without it: `vapo.user_code.user_functions` looks into the current folder last.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

SAFE_PATH = "PYTHONSAFEPATH"
_SET_BY_VAPO = "vapo"
"""Python takes any text as true. This text tells our own setting from the user's."""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in Python, without the current folder on its path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def python_program(program: str, *arguments: str) -> list[str]:
    """Return the command that runs a program's text, without the current folder on its path."""
    return [sys.executable, "-P", "-c", program, *arguments]


def python_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `environ` with a variable that keeps the current folder off children's path.

    A value that `environ` has for it stays.
    """
    return {SAFE_PATH: _SET_BY_VAPO, **environ}


def environment_of_user_code(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` for a process with a user's code, which may import from the current folder.

    The variable that prevents this is removed if vapo has set it.
    """
    return {k: v for k, v in environ.items() if (k, v) != (SAFE_PATH, _SET_BY_VAPO)}


@contextmanager
def safe_path_in_children() -> Iterator[None]:
    """Keep the current folder off the path of every Python process that is started in the block.

    The environment variable that does this keeps a value that the user has set.
    """
    is_ours = SAFE_PATH not in os.environ
    os.environ.setdefault(SAFE_PATH, _SET_BY_VAPO)
    try:
        yield
    finally:
        if is_ours:
            os.environ.pop(SAFE_PATH, None)
