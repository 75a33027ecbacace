"""The trainer's side of `vapo rollout-server`: engines of other processes as one engine."""

from __future__ import annotations

import http.client
import json
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import safetensors.torch
import torch.distributed as dist
from torch import Tensor

from vapo.rollouts.engines.access_token import access_token, authorization
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import RESUME_HINT, EngineError, Generated, Request
from vapo.system.distributed import rank, world_size

_CHUNK_BYTES = 256 << 20
_BINARY = "application/octet-stream"


class RemoteEngine:
    """See `Engine`. Each rank samples from its share of the servers; rank 0 feeds them all.

    A server that gives no token for `timeout_s` counts as hung. Several ranks on one server wait
    for each other, and the wait counts too: give every rank its own server.
    """

    def __init__(self, urls: Sequence[str], *, timeout_s: float) -> None:
        self._all = list(urls)
        self._mine = self._all[rank() :: world_size()] or [self._all[rank() % len(self._all)]]
        self._timeout_s = timeout_s
        self._token = access_token()
        self.has_weights = False
        self.max_tokens = min(int(self._ask(url, "/info")["max_tokens"]) for url in self._all)

    def generate(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        *,
        end_ids: frozenset[int],
        advance: Callable[[int], None] = lambda n: None,
    ) -> list[Generated]:
        """See `Engine.generate`."""
        lock = threading.Lock()

        def finished(num: int) -> None:
            with lock:
                advance(num)

        def ask(url: str, share: Sequence[Request]) -> list[Generated]:
            body = {
                "requests": [[r.prompt_ids, r.seed, r.max_tokens] for r in share],
                "settings": asdict(settings),
                "end_ids": sorted(end_ids),
            }
            answer = self._ask(url, "/generate", json.dumps(body).encode(), finished=finished)
            results = [Generated(tuple(ids), tuple(probs)) for ids, probs in answer["generated"]]
            if len(results) != len(share):
                raise EngineError(f"{url} gave {len(results)} of {len(share)} responses")
            return results

        size = -(-len(requests) // len(self._mine))
        shares = [requests[i : i + size] for i in range(0, len(requests), max(size, 1))]
        with ThreadPoolExecutor(len(self._mine)) as pool:
            futures = [
                pool.submit(ask, url, share) for url, share in zip(self._mine, shares, strict=False)
            ]
            return [generated for future in futures for generated in future.result()]

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.load`. Every rank iterates over the weights; they are sent once."""
        num_tensors, push = 0, secrets.token_hex(8)
        for chunk in _chunks(weights):
            num_tensors += len(chunk)
            if rank() == 0:
                body = safetensors.torch.save(chunk)
                for url in self._all:
                    self._ask(url, "/weights", body, content_type=_BINARY, push=push)
        if rank() == 0:
            for url in self._all:
                body = json.dumps({"num_tensors": num_tensors}).encode()
                self._ask(url, "/load", body, push=push)
        if dist.is_initialized():
            dist.barrier()
        self.has_weights = True

    def sleep(self) -> None:
        """Do nothing: the servers share no device with the trainer."""

    def close(self) -> None:
        """Do nothing: the servers keep running, for the next run."""

    def _ask(
        self,
        url: str,
        path: str,
        body: bytes | None = None,
        *,
        content_type: str = "application/json",
        push: str | None = None,
        finished: Callable[[int], None] = lambda n: None,
    ) -> dict[str, Any]:
        """Send a request and return the answer's last line; earlier lines count responses.

        Args:
            push: which push of weights the request is a part of.

        Raises: EngineError with the server's own message, or when it is unreachable or hangs.
        """
        headers = {} if body is None else {"Content-Type": content_type}
        if push is not None:
            headers["Vapo-Push"] = push
        if self._token is not None:
            headers["Authorization"] = authorization(self._token)
        address = urlsplit(url)
        connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=self._timeout_s
        )
        try:
            # A server that refuses a request may close before it has all of the body.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request("GET" if body is None else "POST", path, body, headers)
            response = connection.getresponse()
            for line in response:
                record: dict[str, Any] = _record(line, response.status)
                if "error" in record:
                    raise EngineError(f"the rollout server {url}: {record['error']}")
                if "finished" not in record:
                    return record
                finished(record["finished"])
            raise ConnectionError("the answer ended early")
        except TimeoutError as error:
            raise EngineError(
                f"the rollout server {url} has given no token for {self._timeout_s:g} s "
                f"(rollouts.vllm.timeout_s) and counts as hung; {RESUME_HINT}"
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise EngineError(
                f"the rollout server {url} does not answer: {reason}; is `vapo rollout-server` "
                f"running there? {RESUME_HINT}"
            ) from error
        finally:
            connection.close()


def _record(line: bytes, status: int) -> dict[str, Any]:
    """Parse one line of an answer. Raises: ValueError for what no rollout server writes."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or (status != 200 and "error" not in record):
        raise ValueError(f"it is no rollout server of this version (HTTP status {status})")
    return record


def _chunks(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Cut weights into chunks of a bounded size; tied weights are sent under each name."""
    chunk: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in weights:
        chunk[name] = tensor.detach().to("cpu", copy=True).contiguous()
        num_bytes += tensor.nbytes
        if num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = {}, 0
    if chunk:
        yield chunk
