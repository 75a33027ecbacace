"""Loads environments of the package verifiers, and their tasks and tools.

An environment is named by the id of its taskset, as the package's own commands name it. Everything
else in its config (`--env.NAME` there) comes from `args`. The package is imported only when it is
used.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vapo.errors import UserError
from vapo.system.installation import install_command

SUPPORTED = "0.4"
TASK = "verifiers_task"
"""The row's column with the data of its task, as the package writes it."""

TOOLS = "verifiers_tools"
"""The row's column with the names of the tools that its prompt describes."""


def check_verifiers_installed(key: str) -> None:
    """Check that a supported version of the package verifiers is installed.

    Raises: UserError: it is missing or has another version; it names the config's `key`.
    """
    try:
        installed = version("verifiers")
    except PackageNotFoundError:
        raise UserError(
            f"{key} needs the package verifiers: {install_command('verifiers')}"
        ) from None
    if installed.split(".")[:2] != SUPPORTED.split("."):
        raise UserError(
            f"{key} needs version {SUPPORTED} of the package verifiers, {installed} is installed: "
            f"{install_command('verifiers')}"
        )


def load_environment(identity: str, args: Mapping[str, Any], *, key: str) -> Any:
    """Load and return an environment of the package.

    The agent's program is the chat of `verifiers_harness`, which runs on this machine, unless the
    environment or `args` chooses another.

    Raises: UserError: it is not installed, or does not take `args`.
    """
    check_verifiers_installed(key)
    from verifiers.v1.utils import loaders

    try:
        config = loaders.resolve_env_config(_config_data(identity, args))
        return loaders.load_environment(config)
    except Exception as error:  # an environment's package may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{key}: the environment {identity} cannot be loaded: {reason}") from None


def _config_data(identity: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the package's config for an environment: `args`, its id, and how its agents run."""
    from verifiers.v1 import AgentConfig
    from verifiers.v1.utils import loaders

    from vapo.environments import verifiers_harness

    harness = verifiers_harness.HARNESS_ID  # which the package imports as a module of that name
    sys.modules.setdefault(harness.replace("-", "_"), verifiers_harness)
    data = {**args, "taskset": {**args.get("taskset", {}), "id": identity}}
    own_program = loaders.default_harness_id(identity) != "bash"
    fields = loaders.env_config_type(identity, args.get("id", "")).model_fields
    for name, field in fields.items():
        role = field.default
        if not isinstance(role, AgentConfig):
            continue
        agent_config = dict(args.get(name) or {})
        if role.runtime.type == "prime":  # the package's default, which is a service
            agent_config.setdefault("runtime", {"type": "subprocess"})
        if role.harness is None and not own_program:
            agent_config.setdefault("harness", {"id": harness})
        data[name] = agent_config
    return data


def task_of(environment: Any, data: Mapping[str, Any]) -> Any:
    """Make the environment's task with this data, as the package's own server does.

    Raises: pydantic.ValidationError: the data is not of a task of this environment.
    """
    task = type(environment.taskset).task_type()
    return task(task.data_type().model_validate(data), environment.config.taskset.task)


def opening_messages(task: Any) -> list[dict[str, Any]]:
    """Return the messages with which a task's conversation begins, without the tools."""
    from vapo.environments.verifiers_harness import opening

    return opening(task.data.system_prompt, task.data.prompt)


def tool_schemas(environment: Any) -> list[dict[str, Any]]:
    """Return the tools that the environment declares, in the form of OpenAI's chat API.

    Tools of a remote server are left out, because they are known only once a client connects to it.
    """
    taskset = environment.taskset
    servers = [
        *taskset.toolsets(taskset.config),
        *type(taskset).task_type().toolsets(taskset.config.task),
    ]
    return asyncio.run(_schemas([s for s in servers if not getattr(s.config, "url", None)]))


async def _schemas(servers: list[Any]) -> list[dict[str, Any]]:
    from mcp.server.mcpserver import MCPServer

    schemas = []
    for server in servers:
        mcp = MCPServer(server.server_name or type(server).__name__)
        server.register(mcp)
        for tool in await mcp.list_tools():
            name = f"{server.server_name}_{tool.name}" if server.server_name else tool.name
            function = {
                "name": name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            schemas.append({"type": "function", "function": function})
    return schemas


def tools_text(tools: list[dict[str, Any]]) -> str:
    """Describe tools to a policy, as chat templates of Qwen and Hermes do; '' without tools."""
    if not tools:
        return ""
    listed = "\n".join(json.dumps(tool) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\nFor each function call, return a json object with "
        "function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
