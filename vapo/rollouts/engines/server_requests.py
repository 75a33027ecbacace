"""Check requests to a rollout server: their sender, speed, size and contents."""

from __future__ import annotations

import io
import json
import math
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from email.message import Message
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from vapo.config.secret_variables import ROLLOUT_SERVER_TOKEN
from vapo.rollouts.engines.access_token import is_authorized
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import Request

_LINGER_S = 2.0
_READ_BYTES = 1 << 16


class RefusalError(Exception):
    """A refused request: the answer is a status code and one line."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """How much a client may send, and how slowly.

    Args:
        weights_bytes: of all tensors of one push, and of one body with some of them.
        json_bytes: of any other body.
        headers_s: from the connection to the end of the request's headers.
        idle_s: without a byte of a body.
        bytes_per_s: the least average rate of a body or an answer, after `idle_s`.
        connections: served at a time; more are refused.
    """

    weights_bytes: int
    json_bytes: int = 256 << 20
    headers_s: float = 10.0
    idle_s: float = 30.0
    bytes_per_s: float = 1 << 20
    connections: int = 128

    def seconds_for(self, num_bytes: int) -> float:
        return self.idle_s + num_bytes / self.bytes_per_s


class TimedReader(io.RawIOBase):
    """Reads a connection, headers first, with a deadline that slow senders cannot extend."""

    def __init__(self, connection: socket.socket, limits: Limits) -> None:
        self._connection = connection
        self._limits = limits
        self._deadline = time.monotonic() + limits.headers_s

    def expect(self, num_bytes: int) -> None:
        """Expect so many more bytes."""
        self._deadline = time.monotonic() + self._limits.seconds_for(num_bytes)

    def linger(self) -> None:
        """Discard the rest, for a moment."""
        self._deadline = time.monotonic() + _LINGER_S

    def buffered(self) -> io.BufferedReader:
        return io.BufferedReader(self, _READ_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises: TimeoutError"""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._connection.settimeout(min(left, self._limits.idle_s))
        return self._connection.recv_into(buffer)


def check_sender(headers: Message, host_names: Collection[str], token: str | None) -> None:
    """Whether the request is a trainer's, not one that a web page had a browser send.

    A page of another site sends its `Origin`, which trainers do not have; a page whose name was
    pointed at this host sends that name as `Host`.

    Raises: RefusalError
    """
    hosts = headers.get_all("Host", [])
    if len(hosts) != 1:
        raise RefusalError(400, "a request needs one Host header")
    if not _is_ours(hosts[0], host_names):
        raise RefusalError(
            403,
            f"this server is not known as {hosts[0][:100]!r}: call it by its address, or start it "
            "with --allowed_host NAME",
        )
    if "Origin" in headers:
        raise RefusalError(403, "requests from web pages are refused")
    if token is not None and not is_authorized(headers.get("Authorization"), token):
        raise RefusalError(
            401, f"the token is not this server's: set {ROLLOUT_SERVER_TOKEN} as it is set there"
        )


def _is_ours(host: str, host_names: Collection[str]) -> bool:
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if name in host_names:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def content_length(headers: Message, limit: int) -> int:
    """Raises: RefusalError where it is missing, not a number or above the limit."""
    lengths = headers.get_all("Content-Length", [])
    if "Transfer-Encoding" in headers or not lengths:
        raise RefusalError(411, "the body needs a Content-Length")
    if len(set(lengths)) > 1 or not (lengths[0].isascii() and lengths[0].isdigit()):
        raise RefusalError(400, f"Content-Length {lengths[0][:50]!r} is not a number of bytes")
    if len(lengths[0]) > 18 or int(lengths[0]) > limit:
        raise RefusalError(413, f"the body has {lengths[0][:50]} bytes, more than {limit}")
    return int(lengths[0])


@dataclass(frozen=True)
class GenerateRequest:
    requests: list[Request]
    settings: SamplingSettings
    end_ids: frozenset[int]


def parse_generate(body: bytes, max_tokens: int) -> GenerateRequest:
    """Raises: RefusalError naming what is wrong."""
    asked = _parse(body, ("requests", "settings", "end_ids"))
    settings = _settings(asked["settings"])
    requests = []
    for index, row in enumerate(_list(asked["requests"], "requests")):
        if not isinstance(row, list) or len(row) != 2:
            raise RefusalError(400, f"requests[{index}] is not [prompt ids, seed]")
        prompt_ids = _integers(row[0], f"the prompt of requests[{index}]")
        if not prompt_ids or len(prompt_ids) + settings.max_response_tokens > max_tokens:
            raise RefusalError(
                400,
                f"requests[{index}]: a prompt of {len(prompt_ids)} tokens and "
                f"{settings.max_response_tokens} more do not fit the engine's {max_tokens}",
            )
        (seed,) = _integers([row[1]], f"the seed of requests[{index}]")
        requests.append(Request(tuple(prompt_ids), seed))
    return GenerateRequest(requests, settings, frozenset(_integers(asked["end_ids"], "end_ids")))


def parse_load(body: bytes) -> int:
    """Parse the number of tensors that the push has.

    Raises: RefusalError
    """
    (expected,) = _integers([_parse(body, ("num_tensors",))["num_tensors"]], "num_tensors")
    return expected


def _parse(body: bytes, keys: tuple[str, ...]) -> dict[str, Any]:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusalError(400, f"the body is not JSON: {error}") from None
    if not isinstance(asked, dict) or asked.keys() != set(keys):
        raise RefusalError(400, f"the body must be an object of {', '.join(keys)}")
    return asked


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise RefusalError(400, f"{name} is not a list")
    return value


def _integers(value: Any, name: str) -> list[int]:
    """Check that all are integers from 0, of 64 bits at most."""
    values = _list(value, name)
    if not all(type(item) is int and 0 <= item < 2**63 for item in values):
        raise RefusalError(400, f"{name}: not integers from 0")
    return values


_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "max_response_tokens": lambda value: type(value) is int and value > 0,
    "temperature": lambda value: type(value) in (int, float) and 0 <= value < math.inf,
    "top_p": lambda value: type(value) in (int, float) and 0 < value <= 1,
    "top_k": lambda value: type(value) is int and value >= 0,
    "greedy": lambda value: type(value) is bool,
}


def _settings(values: Any) -> SamplingSettings:
    if not isinstance(values, dict) or values.keys() != _SETTINGS.keys():
        raise RefusalError(400, f"settings must be an object of {', '.join(_SETTINGS)}")
    for name, is_valid in _SETTINGS.items():
        if not is_valid(values[name]):
            raise RefusalError(400, f"settings.{name} is {str(values[name])[:50]}")
    return SamplingSettings(**values)
