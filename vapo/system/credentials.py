"""The credentials in this process's environment: whom they are withheld from, how they are hidden.

Processes that run a user's code, verifiers and environments, get no variable whose name says that
it holds a credential, unless the config names it for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vapo.config.credentials import is_credential, split_uri
from vapo.config.environment_variables import FromEnvironment
from vapo.errors import UserError

Hidden = tuple[tuple[str, str], ...]
"""Texts and what is shown in their place: `vapo.system.shown_text.hide`."""

_MIN_CHARS = 4
"""A shorter value is found in words that have nothing to do with it."""


def variables_without_credentials(passed: Sequence[str] = ()) -> dict[str, str]:
    """This process's environment variables for one that runs a user's code.

    Args:
        passed: those that it gets although they hold credentials.
    """
    environ = os.environ
    return {k: v for k, v in environ.items() if k in passed or not is_credential(k)}


def check_passed(names: Sequence[str], *, key: str) -> None:
    """Raises: UserError: a variable that the config passes on is not set; names its key."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UserError(
            f"{key} names {', '.join(missing)}, which is not set in the environment: export it, or "
            "leave it out"
        )


def hidden_texts(given: FromEnvironment | None = None, values: Any = None) -> Hidden:
    """What must not be shown: credentials among the variables, and what a config was given.

    Args:
        given: the values of `${oc.env:...}`, each of which is hidden.
        values: further values, in which passwords of URLs are looked for.
    """
    names = set() if given is None else {n for v in given.values.values() for n in v.names}
    found = {}
    for name, value in os.environ.items():
        if name in names or is_credential(name):
            found[value] = f"${{oc.env:{name}}}"
        found |= dict.fromkeys(_passwords(value), "***")
    found |= dict.fromkeys(_passwords(values), "***")
    return tuple((text, shown) for text, shown in found.items() if len(text) >= _MIN_CHARS)


def _passwords(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _passwords(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _passwords(item)
    elif isinstance(value, str) and "://" in value:
        password = split_uri(value).password
        if password is not None:
            yield password
