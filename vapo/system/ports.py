"""Ports that a command is to listen on: a taken one is an error before anything expensive."""

from __future__ import annotations

import errno
import socket

from vapo.errors import UserError


def check_port(host: str, port: int, *, fix: str, in_use: str = "") -> None:
    """Raises: UserError, with the fix, if this process could not listen there.

    `in_use`: what to say before the fix where another process listens there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            hint = in_use if getattr(error, "errno", None) == errno.EADDRINUSE else ""
            raise UserError(
                f"cannot listen on {host or '*'}:{port}: {reason}; {hint}{fix}"
            ) from error
