"""Hands functions of a Python program to the processes that the program starts.

A worker is a new Python process (not a fork), so it cannot import what only exists in the program
that started it: a function of its `__main__`, a lambda, a partial, an object that can be called.
cloudpickle serializes these by value: their code, and what they use of that program. The bytes go
only through the private socket between a process and its own child. Nothing from outside is loaded.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from itertools import count
from types import MethodType
from typing import Any

from vapo.errors import UserError
from vapo.user_code.user_functions import HANDED, MAIN, handed, import_function

_BY_VALUE = (f"{MAIN}:", f"{HANDED}:")
_REWARD = "rewards.function"
_MAX_NAME = 80


def function_path(function: Callable[..., Any], *, key: str) -> str:
    """Return the text that stands for a function object as the value of the config's `key`.

    It is `module:name` if the function can be found under that name, with `__main__` for the
    notebook or script itself. Any other function is kept in this process, under `__handed__:` and a
    name that describes it.

    Raises: UserError: the function cannot be sent to another process, or it is a class although
        `rewards.function` needs a function.
    """
    if isinstance(function, type) and key.endswith(_REWARD):
        raise UserError(
            f"{key}: {function!r:.80} is a class, not a Python function: write a function with "
            "`def` that makes an object of it, or give such an object"
        )
    return _importable_path(function) or f"{HANDED}:{_name_in_hand(function, key)}"


def _importable_path(function: Callable[..., Any]) -> str | None:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    target: Any = sys.modules.get(str(module))
    if target is None or not isinstance(name, str):
        return None
    for part in name.split("."):
        target = getattr(target, part, None)
    is_same = target is function or (isinstance(target, MethodType) and target == function)
    return f"{module}:{name}" if is_same else None


def _name_in_hand(function: Callable[..., Any], key: str) -> str:
    """Keep a function in the dict `handed`, and return its name there.

    Functions with the same code and values share a name.
    """
    description = re.sub(r"[^\w.()=,+-]", "_", _described(function))[:_MAX_NAME]
    pickled = _bytes(function, description, key)
    names = (description if n == 1 else f"{description}_{n}" for n in count(1))
    name = next(n for n in names if n not in handed or _bytes(handed[n], n, key) == pickled)
    handed[name] = function
    return name


def _described(function: Any) -> str:
    """Return a describing name: `score(threshold=0.5)` for a partial, `Judge.score` for a method,
    `Judge` for an object."""
    if isinstance(function, functools.partial):
        keyword_texts = (f"{name}={_shown(value)}" for name, value in function.keywords.items())
        arguments = ",".join([*map(_shown, function.args), *keyword_texts])
        return f"{_described(function.func)}({arguments})"
    if isinstance(function, MethodType):
        owner = function.__self__
        kind = owner if isinstance(owner, type) else type(owner)
        return f"{kind.__name__}.{function.__name__}"
    name = getattr(function, "__qualname__", None)
    name = name if isinstance(name, str) else type(function).__qualname__
    return name.rpartition("<locals>.")[2].replace("<lambda>", "lambda")


def _shown(value: Any) -> str:
    is_short = isinstance(value, bool | int | float | str) and len(repr(value)) <= 20
    return str(value) if is_short else type(value).__name__


def bytes_of(path: str | None, *, key: str) -> bytes | None:
    """Return the pickled function at `__main__:name` or `__handed__:name`, for a child process.

    For any other path it is None, because the child can import the function.

    Raises: UserError: there is no such function, or it uses something that cannot leave this
        process, such as an open file or a model.
    """
    if path is None or not path.startswith(_BY_VALUE):
        return None
    return _bytes(import_function(path, key=key), path, key)


def _bytes(function: Callable[..., Any], name: str, key: str) -> bytes:
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(function)
    except Exception as error:  # whatever the function refers to may raise
        raise UserError(
            f"{key} {name} cannot be sent to the worker processes ({type(error).__name__}: "
            f"{error!s:.200}): put it into a file, and name that as folder/file.py:function"
        ) from None
    return pickled


def function_of(
    path: str | None, function_bytes: bytes | None, *, key: str, folder: str | None
) -> Callable[..., Any]:
    """Return the function that the parent process sent as bytes, or import it from `path`.

    Args:
        path: the function as the config names it, such as `package.module:function`.
        function_bytes: what `bytes_of` returned in the parent process; None imports `path`.
        key: the config key that names the function, for errors.
        folder: the config file's folder, which is searched before the current folder.

    Raises: UserError: the function is not found, cannot be imported, or is not a function; or the
        bytes cannot be unpickled, as when something that the function uses is missing here.
    """
    if function_bytes is None:
        return import_function(path, key=key, folder=folder)
    import cloudpickle

    try:
        function: Callable[..., Any] = cloudpickle.loads(function_bytes)
    except Exception as error:  # imports the user's modules
        raise UserError(
            f"{key} {path} cannot be made in a worker process: {type(error).__name__}: {error}"
        ) from None
    return function
