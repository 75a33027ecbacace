"""The user's own class, as the config's `environment.function` names it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from vapo.environments.episode_answers import MakeEpisode
from vapo.errors import UserError
from vapo.system.handed_functions import function_of
from vapo.system.user_functions import check_arguments, import_function

KEY = "environment.function"

_METHODS = {"reset": "row", "step": "text"}


def user_class(
    path: str, args: Mapping[str, Any], *, folder: str | None = None, sent: bytes | None = None
) -> MakeEpisode:
    """Import the class; each call of what is returned makes the object of one episode.

    Args:
        folder: of the config file that names it, looked into before the current folder.
        sent: the class itself, where the process that trains has it in its own `__main__`.

    Raises:
        UserError: it cannot be imported, lacks a method, or does not take `environment.args`.
    """
    if sent is None:
        made = import_function(path, key=KEY, folder=folder)
    else:
        made = function_of(sent, path=path, key=KEY)
    if isinstance(made, type):
        for method, argument in _METHODS.items():
            _check_method(made, method, argument, path)
    arguments = dict.fromkeys(args, "...")
    check_arguments(made, f"{KEY}: {path} with environment.args", **arguments)
    return functools.partial(made, **args)


def _check_method(made: Callable[..., Any], name: str, argument: str, path: str) -> None:
    method = getattr(made, name, None)
    if not callable(method):
        raise UserError(
            f"{KEY}: {path} has no method {name}({argument}); an environment has reset(row) and "
            "step(text): see docs/environments.md"
        )
    check_arguments(method, f"{KEY}: {path}.{name}", "self", argument)
