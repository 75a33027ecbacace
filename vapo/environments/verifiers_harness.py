"""The agent's program for environments of the package verifiers: a chat that may call tools.

The package's own programs are scripts that uv prepares, over the network, in a process of their
own. This one makes the same calls in the episode's process: to the model through the package's
interception endpoint, to the tools through their MCP servers. It runs no code that the model wrote.
Imported only where the package is installed.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import openai.resources  # noqa: F401 - now, and not in each episode's process
import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]

HARNESS_ID = "vapo-chat"


class ChatHarnessConfig(vf.HarnessConfig):
    """The options of `ChatHarness`. It has none beyond the package's own."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """An agent's program: it calls the model, and the tools that the model asks for.

    It ends with the model's first answer that calls no tool.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        system_prompt, prompt = self.resolve_prompt(data)
        messages = opening(system_prompt, prompt)
        servers = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
            )
            tools, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)
            await _talk(client, ctx.model, messages, tools, dispatch, connected)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _talk(
    client: Any, model: str, messages: list[Any], tools: list[Any], dispatch: Any, servers: Any
) -> None:
    """Call the model and run the tools that it asks for, until it answers without a tool call.

    All messages are appended to `messages`.
    """
    offered = {"tools": tools} if tools else {}
    while True:
        completion = await client.chat.completions.create(model=model, messages=messages, **offered)
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            content = await _result(servers, dispatch, call.function)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def opening(system_prompt: str | None, prompt: Any) -> list[dict[str, Any]]:
    """Return the messages with which a conversation begins, in the form of OpenAI's chat API."""
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(message_to_wire(message) for message in prompt or [])]


async def _result(servers: Any, dispatch: dict[str, Any], function: Any) -> Any:
    """Call a tool; return its result, or an error text for the model to read."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are not JSON ({error})"
    if not isinstance(arguments, dict):
        return f"error: the arguments are a JSON object, not {type(arguments).__name__}"
    if function.name not in dispatch:
        return f"error: there is no tool {function.name!r}"
    return await call_mcp(servers, dispatch, function.name, arguments)
