"""A trainer's connections to one rollout server."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from vapo.rollouts.engines.access_token import access_token, authorization
from vapo.rollouts.engines.engine import RESUME_HINT, EngineError

_JSON = "application/json"
_FULL = 503
_WAIT_S = 0.2  # until a full server is asked again


class LostServerError(EngineError):
    """A server cannot be reached, or hangs."""


class _FullServerError(Exception):
    """A server has no connection left."""


class RolloutServer:
    """One server: its address, and what this trainer has there.

    A server that says nothing for `timeout_s` counts as hung; while it samples it says so every
    second. One that has no connection left is asked again, for as long.

    Args:
        max_connections: how many requests to sample may be under way here; others wait.
    """

    def __init__(self, url: str, *, timeout_s: float, max_connections: int) -> None:
        self.url = url
        self.is_lost = False
        self.num_asked = 0  # requests under way
        self.num_connections = 0
        self.max_connections = max_connections
        self._timeout_s = timeout_s
        self._token = access_token()

    def ask(
        self,
        path: str,
        body: bytes | None = None,
        *,
        content_type: str = _JSON,
        push: str | None = None,
    ) -> dict[str, Any]:
        """Send a request and return the answer's one line.

        Args:
            push: which push of weights the request is a part of.

        Raises: EngineError with the server's own message, or when it is unreachable or hangs.
        """
        return next(self.lines(path, body, content_type=content_type, push=push))

    def lines(
        self,
        path: str,
        body: bytes | None = None,
        *,
        content_type: str = _JSON,
        push: str | None = None,
        opened: Callable[[http.client.HTTPConnection], None] = lambda connection: None,
    ) -> Iterator[dict[str, Any]]:
        """Send a request and give its answer's lines, as they come. Raises: as `ask`."""
        headers = {} if body is None else {"Content-Type": content_type}
        if push is not None:
            headers["Vapo-Push"] = push
        if self._token is not None:
            headers["Authorization"] = authorization(self._token)
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                yield from self._answer(path, body, headers, opened)
            except _FullServerError:
                if time.monotonic() > deadline:
                    raise LostServerError(
                        f"the rollout server {self.url} has had no free connection for "
                        f"{self._timeout_s:g} s (rollouts.servers.timeout_s): fewer trainers "
                        f"should use it at once; {RESUME_HINT}"
                    ) from None
                time.sleep(_WAIT_S)

    def _answer(
        self,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        opened: Callable[[http.client.HTTPConnection], None],
    ) -> Iterator[dict[str, Any]]:
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=self._timeout_s
        )
        opened(connection)
        try:
            # A server that refuses a request may close before it has all of the body.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request("GET" if body is None else "POST", path, body, headers)
            response = connection.getresponse()
            if response.status == _FULL:
                raise _FullServerError
            for line in response:
                record: dict[str, Any] = _record(line, response.status)
                if "error" in record:
                    raise EngineError(f"the rollout server {self.url}: {record['error']}")
                yield record
            raise ConnectionError("the answer ended early")
        except TimeoutError as error:
            raise LostServerError(
                f"the rollout server {self.url} has given no token for {self._timeout_s:g} s "
                f"(rollouts.servers.timeout_s) and counts as hung; {RESUME_HINT}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise LostServerError(self._unreachable(error)) from error
        except ValueError as error:
            raise EngineError(self._unreachable(error)) from error
        finally:
            connection.close()

    def _unreachable(self, error: Exception) -> str:
        reason = str(error) or type(error).__name__
        return (
            f"the rollout server {self.url} does not answer: {reason}; is `vapo rollout-server` "
            f"running there? {RESUME_HINT}"
        )


def hang_up(connection: http.client.HTTPConnection) -> None:
    """End a connection that another thread reads from."""
    with suppress(OSError, AttributeError):  # it is not open yet, or no longer
        connection.sock.shutdown(socket.SHUT_RDWR)


def _record(line: bytes, status: int) -> dict[str, Any]:
    """Parse one line of an answer. Raises: ValueError for what no rollout server writes."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or (status != 200 and "error" not in record):
        raise ValueError(f"it is no rollout server of this version (HTTP status {status})")
    return record
