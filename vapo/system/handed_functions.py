"""A function of the notebook or script itself, on its way to the processes that it starts.

A worker is a new Python process (not a fork), so it cannot import what only exists in the
`__main__` of the process that started it. cloudpickle takes such a function apart by value: its
code, and what it uses of that notebook. The bytes go through the private socket that the
process has with its own child and are read nowhere else; nothing is loaded that came from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vapo.errors import UserError
from vapo.system.user_functions import MAIN, import_function


def bytes_of(path: str | None, *, key: str) -> bytes | None:
    """The function at `__main__:name` for a child process; None where a path can be imported there.

    Raises:
        UserError: there is no such function, or it uses something that cannot leave this process,
            such as an open file or a model.
    """
    if not (path or "").startswith(f"{MAIN}:"):
        return None
    import cloudpickle

    function = import_function(path, key=key)
    try:
        sent: bytes = cloudpickle.dumps(function)
    except Exception as error:  # whatever the function refers to may raise
        raise UserError(
            f"{key} {path} cannot be sent to the worker processes ({type(error).__name__}: "
            f"{error!s:.200}): put it into a file, and name that as folder/file.py:function"
        ) from None
    return sent


def function_of(
    path: str | None, sent: bytes | None, *, key: str, folder: str | None
) -> Callable[..., Any]:
    """In the child: the function that its parent sent, else the one at the path.

    Args:
        sent: where the parent has it in its own `__main__`.

    Raises: UserError: as `import_function`; or something that it uses cannot be imported here.
    """
    if sent is None:
        return import_function(path, key=key, folder=folder)
    import cloudpickle

    try:
        function: Callable[..., Any] = cloudpickle.loads(sent)
    except Exception as error:  # imports the user's modules
        raise UserError(
            f"{key} {path} cannot be made in a worker process: {type(error).__name__}: {error}"
        ) from None
    return function
