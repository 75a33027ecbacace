"""Checks the ports that a command will listen on before it does anything expensive."""

from __future__ import annotations

import errno
import socket

from vapo.errors import UserError


def check_port(host: str, port: int, *, fix: str, in_use: str = "") -> None:
    """Check that this process could listen on a port. An empty `host` means all addresses.

    Args:
        fix: what to do otherwise, for the message.
        in_use: what the message says before the fix if another process listens there.

    Raises: UserError: this process could not listen there.
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
