"""A user's function, named in the config as `package.module:function` and imported when needed."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from vapo.errors import UserError


def import_function(path: str | None, *, key: str) -> Callable[..., Any]:
    """The function that the config's `key` names.

    The module is found as Python finds it, or else in the folder in which the command is started.

    Raises:
        UserError: not importable, or not a function.
    """
    module_name, _, name = (path or "").partition(":")
    if not module_name or not name:
        raise UserError(f"{key} is {path!r}: give it as package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function: Any = importlib.import_module(module_name)
        for part in name.split("."):
            function = getattr(function, part)
    except Exception as error:  # a user's module may raise anything
        raise UserError(f"{key}: cannot import {path}: {type(error).__name__}: {error}") from None
    if not callable(function):
        raise UserError(f"{key}: {path} is {type(function).__name__}, not a function")
    called: Callable[..., Any] = function
    return called


def check_arguments(function: Callable[..., Any], what: str, *args: str, **kwargs: str) -> None:
    """Ask whether a function takes such arguments, without a call.

    Args:
        what: the key and the function, for the message.
        args: the positional arguments' names, for the message.

    Raises:
        UserError: it does not.
    """
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except ValueError:  # built in: it has no signature to ask
        return
    except TypeError as error:
        names = ", ".join([*args, *(f"{name}=..." for name in kwargs)])
        raise UserError(f"{what} cannot be called with ({names}): {error}") from None


def raised_in(function: Callable[..., Any], error: Exception) -> str:
    """What a user's function raised, with the last line of its own file that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    file = function.__code__.co_filename if isinstance(function, FunctionType) else None
    line = next((f.lineno for f in reversed(frames) if f.filename == file), None)
    place = f" ({Path(file).name}:{line})" if file and line else ""
    return f"raised {type(error).__name__}: {error}{place}"
