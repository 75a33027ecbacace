"""The secret that trainers and rollout servers share: from the environment, never from a config."""

from __future__ import annotations

import os
from ipaddress import ip_address

from vapo.config.credentials import ROLLOUT_SERVER_TOKEN
from vapo.errors import UserError

_MIN_CHARACTERS = 16


def access_token() -> str | None:
    """Read the token from this process's environment; None if there is none.

    Raises: UserError for one that is easily guessed or that no HTTP header can carry.
    """
    token = os.environ.get(ROLLOUT_SERVER_TOKEN)
    if token is None:
        return None
    if len(token) < _MIN_CHARACTERS or not all("!" <= character <= "~" for character in token):
        raise UserError(
            f"{ROLLOUT_SERVER_TOKEN} must have at least {_MIN_CHARACTERS} printable ASCII "
            "characters and no spaces; `openssl rand -hex 32` makes one"
        )
    return token


def authorization(token: str) -> str:
    """The value of the HTTP header `Authorization` (RFC 6750)."""
    return f"Bearer {token}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
