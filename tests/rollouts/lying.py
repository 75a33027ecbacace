"""What a lying server makes of its answers, and a proxy that does it to those of a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.rollouts.stand_in_server import Change
from tests.tiny_model import tiny_tokenizer
from vapo.rollouts.engines.contract import SamplingSettings

VOCABULARY = len(tiny_tokenizer())
LONG = SamplingSettings(max_response_tokens=60)  # what the lies are about


def lie(**changes: Any) -> Change:
    def change(answer: dict[str, Any]) -> Any:
        answer["choices"][0] |= changes
        return answer

    return change


def in_choice(change: Change) -> Change:
    def changed(answer: dict[str, Any]) -> Any:
        change(answer["choices"][0])
        return answer

    return changed


LIES: dict[str, tuple[Change, str]] = {
    "no object": (lambda answer: [1], "not a JSON object"),
    "another request's": (lambda answer: answer | {"request_id": "x"}, "for the request 'x'"),
    "no choice": (lambda answer: answer | {"choices": []}, "exactly one response"),
    "two choices": (
        lambda answer: answer | {"choices": answer["choices"] * 2},
        "exactly one response",
    ),
    "no tokens": (lie(token_ids=[]), "not one or more whole numbers"),
    "text": (lie(token_ids="abc"), "not one or more whole numbers"),
    "fractions": (in_choice(lambda c: c["token_ids"].append(1.5)), "whole numbers"),
    "beyond the vocabulary": (
        in_choice(lambda c: c["token_ids"].__setitem__(0, VOCABULARY)),
        f"token {VOCABULARY} is not in the vocabulary",
    ),
    "below 0": (in_choice(lambda c: c["token_ids"].__setitem__(0, -1)), "token -1 is not"),
    "too long": (in_choice(lambda c: c["token_ids"].append(2)), "61 tokens, and at most 60"),
    "too short": (in_choice(lambda c: c["token_ids"].pop()), "59 of 60 tokens without an end"),
    "one log-prob less": (
        in_choice(lambda c: c["logprobs"]["content"].pop()),
        "59 log-probs for 60 tokens",
    ),
    "no log-probs": (lie(logprobs=None), "0 log-probs for 60 tokens"),
    "another token's log-prob": (
        in_choice(lambda c: c["logprobs"]["content"][3].update(token_id=-5)),
        "belongs to another token",
    ),
    "log-prob above 0": (
        in_choice(lambda c: c["logprobs"]["content"][3].update(logprob=0.5)),
        "is 0.5, above 0",
    ),
    "log-prob as text": (
        in_choice(lambda c: c["logprobs"]["content"][3].update(logprob="x")),
        "is not a number",
    ),
    "no versions": (lie(weight_versions=None), "weight_versions do not say"),
    "versions of some tokens": (
        in_choice(lambda c: c["weight_versions"][0].update(end=3)),
        "weight_versions do not say",
    ),
}


class LyingProxy(ThreadingHTTPServer):
    """Passes everything on to a server; `change` is what it makes of the answers to requests."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.target, self.num_answers = target, 0
        self.change: Change = lambda answer: answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Passing(BaseHTTPRequestHandler):
    server: LyingProxy

    def do_GET(self) -> None:
        self._pass(None)

    def do_POST(self) -> None:
        self._pass(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _pass(self, body: bytes | None) -> None:
        kind = {"Content-Type": "application/json"}
        asked = Request(self.server.target + self.path, body, kind, method=self.command)
        try:
            with urlopen(asked, timeout=120) as response:
                status, text = response.status, response.read()
        except HTTPError as error:
            status, text = error.code, error.read()
        if self.path == "/inference/v1/generate" and status == 200:
            self.server.num_answers += 1
            text = json.dumps(self.server.change(json.loads(text))).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        return


@contextmanager
def lying_proxy(target: str) -> Iterator[LyingProxy]:
    with LyingProxy(target) as proxy:
        Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
