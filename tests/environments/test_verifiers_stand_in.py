"""Our part of an episode of the package verifiers, with stand-ins for it and for openai.

test_verifiers_package.py plays the same with the packages themselves, where they are installed.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

HARNESS = "vapo.environments.verifiers_harness"
ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "a sum", "parameters": {}},
}


class Harness:
    config = SimpleNamespace(tool_timeout=1.0)

    def __class_getitem__(cls, config: type) -> type:
        return cls

    def resolve_prompt(self, data: Any) -> tuple[str | None, Any]:
        return data.system_prompt, data.prompt


class Message(SimpleNamespace):
    def model_dump(self, *, exclude_none: bool) -> dict[str, Any]:
        assert exclude_none
        return {"role": "assistant", "content": self.content}


class AsyncOpenAI:
    """Sends a call as openai's client does, and reads what is used of the answer."""

    def __init__(self, *, base_url: str, api_key: str, max_retries: int, timeout: None) -> None:
        self.url, self.key = base_url, api_key
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    async def __aenter__(self) -> AsyncOpenAI:
        return self

    async def __aexit__(self, *error: object) -> None:
        return

    async def create(self, **body: Any) -> Any:
        message: Any = await asyncio.to_thread(self.posted, json.dumps(body).encode())
        calls = [
            SimpleNamespace(id=call["id"], function=SimpleNamespace(**call["function"]))
            for call in message.get("tool_calls") or ()
        ]
        choice = SimpleNamespace(message=Message(content=message["content"], tool_calls=calls))
        return SimpleNamespace(choices=[choice])

    def posted(self, body: bytes) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(
            f"{self.url}/chat/completions", body, {**headers, "X-Session-ID": "trace"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10) as response:
            message: dict[str, Any] = json.load(response)["choices"][0]["message"]
        return message


async def connect_mcp(config: Any, stack: Any) -> tuple[list[Any], dict[str, Any], Any]:
    tools = [ADD] if config["mcpServers"] else []
    return tools, {tool["function"]["name"]: "server" for tool in tools}, "connected"


async def call_mcp(servers: Any, dispatch: Any, name: str, arguments: dict[str, Any]) -> str:
    assert (servers, dispatch[name]) == ("connected", "server")
    return str(arguments["a"] + arguments["b"])


class Task:
    def __init__(self, data: Any, config: Any) -> None:
        self.data, self.config = data, config

    @staticmethod
    def data_type() -> Any:
        return SimpleNamespace(model_validate=lambda data: SimpleNamespace(**data))


class Taskset:
    @staticmethod
    def task_type() -> type[Task]:
        return Task


class Environment:
    """One agent, whose program is ours."""

    taskset = Taskset()
    config = SimpleNamespace(taskset=SimpleNamespace(task=None))

    def __init__(self, *servers: str, error: Any = None) -> None:
        self.servers, self.error = servers, error

    @asynccontextmanager
    async def serving(self) -> Any:
        yield

    async def run_episode(self, task: Task, context: Any) -> Any:
        harness = importlib.import_module(HARNESS).ChatHarness()
        key = os.environ[context.client.api_key_var]
        urls = dict.fromkeys(self.servers, "http://tools")
        await harness.launch(context, None, None, context.client.base_url, key, urls, task.data)
        trace = SimpleNamespace(id="trace", reward=0.75, errors=[])
        return SimpleNamespace(errors=[self.error] if self.error else [], traces=[trace])


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def module(name: str, **contents: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, made)

    for name in ("verifiers", "verifiers.v1.dialects", "verifiers.v1.harnesses"):
        module(name)
    module("openai", AsyncOpenAI=AsyncOpenAI)
    module("openai.resources")
    made = dict.fromkeys(("ProgramResult", "EvalClientConfig", "ModelContext"), SimpleNamespace)
    module("verifiers.v1", HarnessConfig=object, Harness=Harness, **made)
    module("verifiers.v1.dialects.chat", message_to_wire=dict)
    module("verifiers.v1.harnesses.utils")
    module("verifiers.v1.harnesses.utils.mcp", connect_mcp=connect_mcp, call_mcp=call_mcp)
    monkeypatch.delitem(sys.modules, HARNESS, raising=False)
    for name in ("NO_PROXY", "no_proxy", "VAPO_POLICY_API_KEY"):
        monkeypatch.setenv(name, "")
    yield
    sys.modules.pop(HARNESS, None)


@pytest.fixture
def begun() -> Iterator[Any]:
    """Begins an episode of an environment; gives it and what its reset said."""
    from vapo.environments.verifiers_episode import VerifiersEpisode

    opened: list[VerifiersEpisode] = []

    def begin(environment: Environment, **columns: Any) -> tuple[VerifiersEpisode, str]:
        opened.append(VerifiersEpisode(environment))
        data = {"system_prompt": "Obey.", "prompt": "2 + 2?"}
        return opened[-1], opened[-1].reset({"verifiers_task": data, **columns})

    yield begin
    for episode in opened:
        episode.close()


def called(**arguments: Any) -> str:
    call = {"name": "add", "arguments": arguments}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def test_an_answer_ends_the_episode_with_its_reward(begun: Any) -> None:
    episode, said = begun(Environment())
    assert said == "", "the prompt has all of it"
    assert episode.step("4") == (None, 0.75)


def test_tools_are_described_and_called_and_their_results_read(begun: Any) -> None:
    episode, said = begun(Environment("calculator"))
    assert '"name": "add"' in said
    assert episode.step(called(a=2, b=2)) == ("<tool_response>\n4\n</tool_response>", 0.0)
    other = '<tool_call>{"name": "sub", "arguments": {}}</tool_call>'
    observation, _ = episode.step(other)
    assert "error: there is no tool 'sub'" in observation
    assert episode.step("4") == (None, 0.75)


def test_tools_that_the_prompt_describes_are_not_described_again(begun: Any) -> None:
    _, said = begun(Environment("calculator"), verifiers_tools=["add"])
    assert said == ""


def test_what_the_rollout_raised_is_the_episode_s_error(begun: Any) -> None:
    episode, _ = begun(Environment(error=SimpleNamespace(type="ToolError", message="lost")))
    with pytest.raises(RuntimeError, match="ToolError: lost"):
        episode.step("4")


def test_a_row_of_another_source_is_named(begun: Any) -> None:
    with pytest.raises(ValueError, match="the row has no column verifiers_task"):
        begun(Environment(), verifiers_task=None)


def test_a_conversation_begins_with_its_system_prompt_and_messages() -> None:
    opening = importlib.import_module(HARNESS).opening
    user = {"role": "user", "content": "hi"}
    assert opening(None, "hi") == [user]
    assert opening("Obey.", [user]) == [{"role": "system", "content": "Obey."}, user]
    assert opening("", None) == []
