"""Keeps the credentials in this process's environment from a user's code, and lists them for
hiding.

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
"""Pairs of a text and what is shown in its place; see `vapo.errors.redactor.hide`."""


def variables_without_credentials(passed: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables for a process that runs a user's code, without credentials.

    Args:
        passed: the names of variables that are included although they hold credentials.
    """
    withheld = secret_variables().keys() - set(passed)
    return {name: value for name, value in os.environ.items() if name not in withheld}


def check_passed(names: Sequence[str], *, key: str) -> None:
    """Check that the environment variables `names`, which the config's `key` passes on, are set.

    Raises: UserError: one of them is not.
    """
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UserError(
            f"{key} names {', '.join(missing)}, which is not set in the environment: export it, or "
            "leave it out"
        )


def secret_texts(values: Any = None) -> Hidden:
    """Return the secrets in environment variables and in texts of config values.

    Each is paired with the text that is shown in its place. A secret that is only in a config value
    is shown as `***`.
    """
    texts = texts_of_environment()
    for text in _texts_in(values):
        for secret in secrets_within(text):
            texts.setdefault(secret, "***")
    return tuple(texts.items())


def secret_texts_of_code(
    passed: Sequence[str], args: Any = None, from_environment: FromEnvironment | None = None
) -> Hidden:
    """Return the secrets that a user's code is given and that its failures must not show.

    Each is paired with the text that is shown in its place. Secrets that the code is not given are
    left out, because it could read the list.

    Args:
        passed: the names of the variables with credentials that the code gets.
        args: the arguments that the code is called with.
        from_environment: the arguments that come from environment variables.
    """
    texts = dict(texts_of_variables(passed))
    texts |= {} if from_environment is None else dict(from_environment.texts)
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
