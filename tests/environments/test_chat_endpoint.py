"""The endpoint that an environment of another package takes for its model."""

from __future__ import annotations

import http.client
import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest

from vapo.environments.chat_endpoint import (
    ChatCall,
    ChatEndpoint,
    assistant_message,
    observation_text,
)
from vapo.environments.verifiers_package import check_verifiers_installed
from vapo.errors import UserError

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é<b>"}}\n</tool_call>'


def calls_of(text: str, *, has_tools: bool = True) -> list[tuple[str, Any]]:
    message = assistant_message(text, has_tools=has_tools)
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(f["name"], json.loads(f["arguments"])) for f in functions]


def test_tool_calls_are_read_from_the_text():
    message = assistant_message(f"I look.\n{CALL}\n{CALL}", has_tools=True)
    assert message["content"] == "I look."
    assert [call["id"] for call in message["tool_calls"]] == ["call_0", "call_1"]
    assert calls_of(f"{CALL}") == [("f", {"x": "é<b>"})]
    assert calls_of('<tool_call>{"name": "g"}</tool_call>') == [("g", {})]


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "<tool_call>{not JSON}</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}',
    ],
)
def test_what_is_no_whole_call_stays_text(text: str):
    assert assistant_message(text, has_tools=True) == {"role": "assistant", "content": text}


def test_without_tools_nothing_is_a_call():
    assert assistant_message(CALL, has_tools=False) == {"role": "assistant", "content": CALL}


def test_messages_are_one_text():
    messages: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": "call_0", "content": "4"},
        {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "image_url"}]},
        {"role": "user", "content": None},
    ]
    assert observation_text(messages) == "<tool_response>\n4\n</tool_response>\nand\n\n"


@pytest.fixture
def calls() -> queue.Queue[ChatCall]:
    return queue.Queue()


@pytest.fixture
def endpoint(calls: queue.Queue[ChatCall]) -> Iterator[ChatEndpoint]:
    made = ChatEndpoint(calls.put)
    yield made
    made.close()


def post(endpoint: ChatEndpoint, path: str = "/chat/completions", **body: Any) -> Any:
    request = urllib.request.Request(
        endpoint.base_url + path,
        json.dumps({"messages": [{"role": "user", "content": "hi"}], **body}).encode(),
        {
            "Content-Type": "application/json",
            "X-Session-ID": "mine",
            "Authorization": f"Bearer {endpoint.api_key}",
        },
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as response:
        return response.read().decode()


def test_a_call_waits_for_its_answer(endpoint: ChatEndpoint, calls: queue.Queue[ChatCall]):
    tool = {"type": "function", "function": {"name": "f"}}
    endpoint.answer(CALL)
    whole = json.loads(post(endpoint, tools=[tool]))
    assert calls.get() == ChatCall([{"role": "user", "content": "hi"}], [tool], "mine")
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_a_streamed_answer_is_the_same_in_one_event(endpoint: ChatEndpoint):
    endpoint.answer("hello")
    event, done = post(endpoint, stream=True).strip().split("\n\n")
    assert done == "data: [DONE]"
    choice = json.loads(event.removeprefix("data: "))["choices"][0]
    assert choice == {
        "index": 0,
        "delta": {"role": "assistant", "content": "hello"},
        "finish_reason": "stop",
    }


def test_one_call_at_a_time_and_no_other_path(endpoint: ChatEndpoint, calls: queue.Queue[ChatCall]):
    first = threading.Thread(target=post, args=(endpoint,))
    first.start()
    calls.get(timeout=5)
    with pytest.raises(urllib.error.HTTPError) as busy:
        post(endpoint)
    with pytest.raises(urllib.error.HTTPError) as other:
        post(endpoint, "/embeddings")
    assert (busy.value.code, other.value.code) == (409, 404)
    endpoint.answer("done")
    first.join(5)
    assert not first.is_alive()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": None}, 401),
        ({"Authorization": "Bearer of another episode"}, 401),
        ({"Authorization": "Bearer \u00e9"}, 401),
        ({"Origin": "http://127.0.0.1"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost:80"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Length": "-1"}, 413),
        ({"Content-Length": "9" * 30}, 413),
        ({"Content-Length": None}, 413),
    ],
)
def test_a_foreign_request_is_no_call(
    endpoint: ChatEndpoint,
    calls: queue.Queue[ChatCall],
    headers: dict[str, str | None],
    status: int,
):
    """A page in a browser, another episode, another user: the open episode goes on."""
    host = endpoint.base_url.split("/")[2]
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    own: dict[str, str | None] = {
        "Host": host,
        "Authorization": f"Bearer {endpoint.api_key}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
    }
    connection = http.client.HTTPConnection(host, timeout=10)
    connection.putrequest("POST", "/v1/chat/completions", skip_host=True)
    for name, value in (own | headers).items():
        if value is not None:
            connection.putheader(name, value.encode())
    connection.endheaders(body)
    response = connection.getresponse()
    response.read()
    connection.close()
    assert response.status == status
    assert calls.empty()
    endpoint.answer("hello")
    assert "hello" in post(endpoint)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b"{", b'{"messages": 3}', b'{"messages": [{}]}', b"[" * 100_000]
)
def test_what_is_no_chat_completion_is_no_call(
    endpoint: ChatEndpoint, calls: queue.Queue[ChatCall], body: bytes
):
    request = urllib.request.Request(
        endpoint.base_url + "/chat/completions",
        body,
        {"Content-Type": "application/json", "Authorization": f"Bearer {endpoint.api_key}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as refused:
        opener.open(request, timeout=10)
    assert refused.value.code == 400
    assert calls.empty()


def test_each_endpoint_has_a_key_of_its_own(endpoint: ChatEndpoint):
    other = ChatEndpoint(lambda call: None)
    other.close()
    assert endpoint.api_key != other.api_key
    assert len(endpoint.api_key) >= 32


@pytest.mark.parametrize("installed", ["0.3.9", "1.0.0"])
def test_another_version_of_the_package_is_named(installed: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vapo.environments.verifiers_package.version", lambda name: installed)
    with pytest.raises(UserError, match=rf"environment\.id needs version 0\.4 .*{installed} is in"):
        check_verifiers_installed("environment.id")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("vapo.environments.verifiers_package.version", missing)
    with pytest.raises(UserError, match=r"environment\.id needs the package verifiers: pip inst"):
        check_verifiers_installed("environment.id")
