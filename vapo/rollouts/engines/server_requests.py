"""Check requests to a rollout server: their sender, speed, size and contents."""

from __future__ import annotations

import hmac
import io
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from email.message import Message
from ipaddress import ip_address
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vapo.config.credentials import ROLLOUT_SERVER_TOKEN
from vapo.rollouts.engines.access_token import authorization


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

    def allow(self, seconds: float) -> None:
        """Set the deadline of what is read from now on."""
        self._deadline = time.monotonic() + seconds

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
    given = headers.get("Authorization", "").encode("utf-8", "replace")
    if token is not None and not hmac.compare_digest(given, authorization(token).encode()):
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


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


_Integer = Annotated[int, Field(ge=0, lt=2**63)]
_Integers = Annotated[tuple[_Integer, ...], Field(fail_fast=True)]


_Episode = Annotated[str, Field(max_length=200)]
_Budget = Annotated[int, Field(gt=0, lt=2**63)]


class LoadBody(_Body):
    num_tensors: _Integer


class _Settings(_Body):
    max_response_tokens: Annotated[int, Field(gt=0)]
    temperature: Annotated[float, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Annotated[int, Field(ge=0)]
    greedy: bool


class GenerateBody(_Body):
    """Each request is [prompt ids, seed, its own most tokens or null, its episode or null]."""

    requests: Annotated[
        list[tuple[_Integers, _Integer, _Budget | None, _Episode | None]], Field(fail_fast=True)
    ]
    settings: _Settings
    end_ids: _Integers


Body = TypeVar("Body", bound=_Body)


def parse(kind: type[Body], body: bytes) -> Body:
    """Raises: RefusalError naming the first mistake."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, ("body", *first["loc"])))[:100]
        raise RefusalError(400, f"{place}: {first['msg']}") from None


def check_lengths(wanted: GenerateBody, max_tokens: int) -> None:
    """Raises: RefusalError naming a prompt that is empty or does not fit the engine."""
    most = wanted.settings.max_response_tokens
    for index, (prompt_ids, _, own, _) in enumerate(wanted.requests):
        budget = most if own is None else min(own, most)
        if not prompt_ids or len(prompt_ids) + budget > max_tokens:
            raise RefusalError(
                400,
                f"requests[{index}]: a prompt of {len(prompt_ids)} tokens and {budget} more do not "
                f"fit the engine's {max_tokens}",
            )
