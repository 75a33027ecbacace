"""The credentials in this process's environment: whom they are withheld from, how they are hidden.

Processes that run a user's code, verifiers and environments, get no variable that holds a secret
(`vapo.errors.secret_rule`), unless the config names it for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vapo.config.environment_variables import FromEnvironment, texts_of_variables
from vapo.errors import UserError
from vapo.errors.redactor import texts_of_environment
from vapo.errors.secret_rule import secret_variables, secrets_within

Hidden = tuple[tuple[str, str], ...]
"""Texts and what is shown in their place: `vapo.errors.redactor.hide`."""


def variables_without_credentials(passed: Sequence[str] = ()) -> dict[str, str]:
    """This process's environment variables for one that runs a user's code.

    Args:
        passed: those that it gets although they hold credentials.
    """
    withheld = secret_variables().keys() - set(passed)
    return {name: value for name, value in os.environ.items() if name not in withheld}


def check_passed(names: Sequence[str], *, key: str) -> None:
    """Raises: UserError: a variable that the config passes on is not set; names its key."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UserError(
            f"{key} names {', '.join(missing)}, which is not set in the environment: export it, or "
            "leave it out"
        )


def secret_texts(values: Any = None) -> Hidden:
    """What this process must not show: secrets of its variables, and those in a config's values."""
    texts = texts_of_environment()
    for text in _texts_in(values):
        for secret in secrets_within(text):
            texts.setdefault(secret, "***")
    return tuple(texts.items())


def secret_texts_of_code(
    passed: Sequence[str], args: Any = None, given: FromEnvironment | None = None
) -> Hidden:
    """What the failures of a user's code must not show, of what the code is given.

    What is withheld from it is not here: it could read the list.

    Args:
        passed: the variables that it gets.
        args: what it is called with.
        given: which of the arguments the environment gives.
    """
    texts = dict(texts_of_variables(passed))
    texts |= {} if given is None else dict(given.texts)
    for text in _texts_in(args):
        texts |= dict.fromkeys(set(secrets_within(text)) - texts.keys(), "***")
    return tuple(texts.items())


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, str):
        yield value
    elif isinstance(value, Iterable):
        for item in value:
            yield from _texts_in(item)
