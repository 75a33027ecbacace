"""Limits the size of a tracking server's HTTP answers, and the time that they take.

MLflow's client reads a whole answer into memory, and waits as long as a byte comes now and then. In
that way a broken or hostile server could use up the training's memory, or delay its start.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from functools import cache
from typing import Any

import requests
from mlflow.utils import request_utils
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection

MAX_ANSWER_BYTES = 2**27
ANSWER_S = 60.0
_CHUNK_BYTES = 2**16

_request = threading.local()  # the request of this thread, while it is answered
_MlflowAdapter: type[HTTPAdapter] = request_utils.TCPKeepAliveHTTPAdapter


@cache
def limit_answers() -> None:
    """Limit the answers to all requests that MLflow's client makes in this process from now on.

    The client keeps its connections open, so this must be called before its first request.
    """
    request_utils.TCPKeepAliveHTTPAdapter = BoundedAdapter


class BoundedAdapter(_MlflowAdapter):  # type: ignore[misc, valid-type]
    """An HTTP adapter that ends a request whose answer is too large or takes too long.

    A streamed answer, which is how files are downloaded, has no size limit.
    """

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
        manager = super().proxy_manager_for(*args, **options)
        manager.pool_classes_by_scheme = _POOLS
        return manager

    def send(self, request: Any, stream: bool = False, **options: Any) -> requests.Response:
        """Send a request; return the response, whose content is read unless it is streamed.

        Raises: requests.RequestException: the request failed, or its answer is beyond a limit.
        """
        deadline, error = _Deadline(), None
        _request.deadline = deadline
        try:
            response: requests.Response = super().send(request, stream=stream, **options)
            if not stream:
                _read(response)
        except requests.RequestException as raised:
            error = raised
        finally:
            deadline.end()
            _request.deadline = None
        if deadline.is_over:  # what was cut may look like a whole answer
            reason = f"no whole answer came within {ANSWER_S:g} s"
            raise requests.exceptions.ReadTimeout(reason, request=request) from error
        if error is not None:
            raise error
        return response


def _read(response: requests.Response) -> None:
    """Read an answer's content as `requests` does, but only up to `MAX_ANSWER_BYTES`.

    Raises: ContentDecodingError: the answer is larger.
    """
    content = bytearray()
    for chunk in response.iter_content(_CHUNK_BYTES):
        content += chunk
        if len(content) > MAX_ANSWER_BYTES:
            response.close()
            raise requests.exceptions.ContentDecodingError(
                f"the answer is larger than {MAX_ANSWER_BYTES // 2**20} MiB"
            )
    response._content, response._content_consumed = bytes(content), True


class _Deadline:
    """Shuts down this thread's connection if an answer takes longer than `ANSWER_S`.

    The time begins once the request has been sent: a large file may take any time to send.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._timers: list[threading.Timer] = []

    def begin(self, connection: socket.socket) -> None:
        timer = threading.Timer(ANSWER_S, self._cut, (connection,))
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def end(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _cut(self, connection: socket.socket) -> None:
        self.is_over = True
        with suppress(OSError):  # it is closed already
            connection.shutdown(socket.SHUT_RDWR)


class _Noted:
    """Mixin for connections: waiting for an answer starts the deadline of the thread's request."""

    sock: Any

    def getresponse(self) -> Any:
        if self.sock is not None and (deadline := getattr(_request, "deadline", None)):
            deadline.begin(self.sock)
        return super().getresponse()  # type: ignore[misc]


class _Connection(_Noted, HTTPConnection):
    pass


class _SecureConnection(_Noted, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


_POOLS = {"http": _Pool, "https": _SecurePool}
