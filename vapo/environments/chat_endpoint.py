"""An OpenAI-compatible endpoint on this machine, at which an environment calls the policy.

An environment of another package calls its model over HTTP. Here each call waits until `answer`
gets a text, which the trainer samples from the policy. Tool calls are read from the text as the
chat templates of Qwen and Hermes write them: `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`.

Other users of the machine, and web pages, reach its port too: a call must have the endpoint's key.
"""

from __future__ import annotations

import json
import queue
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "policy"
SESSION_HEADER = "X-Session-ID"

_JSON = "application/json"
_MAX_BODY_BYTES = 2**28
_POLL_S = 0.02  # closing takes up to this long

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ChatCall:
    """A call of the model by the environment: the whole conversation, and the tools it may use."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    session: str
    """The caller's own name for its conversation."""


class _RefusedCall(Exception):
    """Raised for a request that is refused. Its arguments are the HTTP status and the reason."""


class ChatEndpoint:
    """An HTTP server that hands an environment's calls of its model to the trainer, one at a time.

    A call must have `api_key` as its bearer token. A refused request changes nothing.

    Args:
        on_call: called with each call, in the thread of the call's connection.
    """

    def __init__(self, on_call: Callable[[ChatCall], None]) -> None:
        self._on_call = on_call
        self._answers: queue.Queue[str] = queue.Queue()
        self._is_busy = threading.Lock()
        self.api_key = secrets.token_urlsafe(32)
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                endpoint._serve(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing, because the process's output belongs to the environment."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._host = f"127.0.0.1:{self._server.server_address[1]}"
        self.base_url = f"http://{self._host}/v1"
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(_POLL_S,), daemon=True).start()

    def answer(self, text: str) -> None:
        """Answer the open call with the text that the model wrote."""
        self._answers.put(text)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        """Serve one HTTP request: refuse it, or pass the call on and send the policy's answer."""
        try:
            body = self._body(handler)
            if not self._is_busy.acquire(blocking=False):
                raise _RefusedCall(409, "one call at a time")
        except _RefusedCall as refused:
            status, reason = refused.args
            handler.close_connection = True  # its body may be there unread
            _send(handler, status, _JSON, json.dumps({"error": reason}))
            return
        try:
            session = handler.headers.get(SESSION_HEADER, "")
            self._on_call(ChatCall(body["messages"], body.get("tools") or [], session))
            message = assistant_message(self._answers.get(), has_tools=bool(body.get("tools")))
        finally:
            self._is_busy.release()
        is_stream = bool(body.get("stream"))
        answer = json.dumps(_completion(message, is_stream=is_stream))
        if is_stream:
            _send(handler, 200, "text/event-stream", f"data: {answer}\n\ndata: [DONE]\n\n")
        else:
            _send(handler, 200, _JSON, answer)

    def _body(self, handler: BaseHTTPRequestHandler) -> dict[str, Any]:
        """Return a request's body, after checking key, headers and form.

        Raises: _RefusedCall: it is not a call of this process's environment.
        """
        headers = handler.headers
        if "Origin" in headers or headers.get("Host") != self._host:
            raise _RefusedCall(403, "for the environment of this process alone")
        authorization = headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not secrets.compare_digest(authorization, f"Bearer {self.api_key}".encode()):
            raise _RefusedCall(401, "not the key of this endpoint")
        if not handler.path.endswith("/chat/completions"):
            raise _RefusedCall(404, "only chat completions")
        if headers.get_content_type() != _JSON:
            raise _RefusedCall(415, f"the body must be {_JSON}")
        length = headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or int(length) > _MAX_BODY_BYTES:
            raise _RefusedCall(413, f"a body needs its length, at most {_MAX_BODY_BYTES} bytes")
        try:
            body = json.loads(handler.rfile.read(int(length)))
            is_list = isinstance(body["messages"], list)
            is_call = is_list and all(isinstance(m["role"], str) for m in body["messages"])
        except (ValueError, TypeError, LookupError, RecursionError):
            is_call = False
        if not is_call:
            raise _RefusedCall(400, "the body is not a chat completion")
        return body


def assistant_message(text: str, *, has_tools: bool) -> dict[str, Any]:
    """Return a model's text as a chat message with parsed tool calls; malformed ones stay text.

    >>> assistant_message('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
    ...                   has_tools=True)["tool_calls"][0]["function"]
    {'name': 'f', 'arguments': '{"x": 1}'}
    """
    calls: list[dict[str, Any]] = []

    def collect_call(match: re.Match[str]) -> str:
        call = _tool_call(match[1], len(calls))
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    content = _TOOL_CALL.sub(collect_call, text).strip() if has_tools else text
    message: dict[str, Any] = {"role": "assistant", "content": content if calls else text}
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(text: str, index: int) -> dict[str, Any] | None:
    """Parse the JSON of a tool call; return it in OpenAI's form, or None if it is malformed."""
    try:
        call = json.loads(text)
        name = call["name"]
    except (ValueError, LookupError, RecursionError):
        return None
    if not isinstance(name, str):
        return None
    arguments = call.get("arguments", {})
    arguments_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": f"call_{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments_text},
    }


def _completion(message: dict[str, Any], *, is_stream: bool) -> dict[str, Any]:
    """Return a message as the body of an OpenAI chat completion, or of a chunk of it."""
    calls = message.get("tool_calls")
    if calls and is_stream:
        message = {**message, "tool_calls": [{**call, "index": i} for i, call in enumerate(calls)]}
    choice = {
        "index": 0,
        "delta" if is_stream else "message": message,
        "finish_reason": "tool_calls" if calls else "stop",
    }
    kind = "chat.completion.chunk" if is_stream else "chat.completion"
    return {"id": "policy", "object": kind, "created": 0, "model": MODEL, "choices": [choice]}


def _send(handler: BaseHTTPRequestHandler, status: int, kind: str, text: str) -> None:
    body = text.encode()
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def observation_text(messages: Sequence[dict[str, Any]]) -> str:
    """Return messages as one text for the policy, with tools' results in `<tool_response>` tags."""
    texts = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "\n".join(part.get("text", "") for part in content)
        is_tool = message["role"] == "tool"
        texts.append(f"<tool_response>\n{content}\n</tool_response>" if is_tool else content)
    return "\n".join(texts)
