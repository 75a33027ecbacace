"""Runs an episode of an environment of the package verifiers, with the methods `reset` and `step`.

The environment drives its rollout itself, in a thread, and calls its model over HTTP. Each call
becomes an observation: the messages that were added since the policy's last turn. The next `step`
answers the call. When the rollout has ended, its reward is the last step's.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from typing import Any

from vapo.environments.chat_endpoint import MODEL, ChatCall, ChatEndpoint, observation_text
from vapo.environments.verifiers_package import (
    TASK,
    TOOLS,
    opening_messages,
    task_of,
    tools_text,
)

_KEY_VARIABLE = "VAPO_POLICY_API_KEY"

_CANCEL_TIMEOUT_S = 1.5


class VerifiersEpisode:
    """Runs one rollout of an environment of the package verifiers, with the policy as its model.

    The rollout runs in a thread of its own. `reset` begins it, and each `step` answers one of its
    calls of the model, until the end gives the reward.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._events: queue.Queue[ChatCall | BaseException | float] = queue.Queue()
        self._endpoint = ChatEndpoint(self._events.put)
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._seen_messages: list[dict[str, Any]] = []
        self._session = ""

    def reset(self, row: dict[str, Any]) -> str:
        """Begin the rollout of the row's task; return what its first call adds to the prompt.

        Raises: ValueError: the row is not of a task of the environment, or the rollout begins with
            other messages than the task's.
        """
        data = row.get(TASK)
        if not isinstance(data, dict):
            raise ValueError(
                f"the row has no column {TASK}: environment.kind verifiers needs the rows of a "
                "data source of the kind verifiers"
            )
        task = task_of(self._environment, data)
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
        self._thread = threading.Thread(target=self._run, args=(task,), daemon=True)
        self._thread.start()
        call = self._next_call()
        if call is None:
            raise ValueError("the rollout ended without a call of the model")
        self._session = call.session
        self._seen_messages = opening_messages(task)
        described = set(row.get(TOOLS) or [])
        tools = [tool for tool in call.tools if tool["function"]["name"] not in described]
        return "\n\n".join(filter(None, [tools_text(tools), self._added(call)]))

    def step(self, text: str) -> tuple[str | None, float]:
        """Answer the open call of the model with the policy's text.

        Returns: the text that the next call adds and 0; at the rollout's end None and the reward.
        """
        self._seen_messages.append({"role": "assistant"})
        self._endpoint.answer(text)
        call = self._next_call()
        if call is None:
            return None, self._reward
        if call.session != self._session:
            raise ValueError(
                "more than one agent of the environment calls the policy: give the others a "
                "`client` of their own in environment.args"
            )
        return self._added(call), 0.0

    def close(self) -> None:
        """Cancel the rollout, so that it ends everything it has started, and close the endpoint."""
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(_CANCEL_TIMEOUT_S)
        self._endpoint.close()

    def _next_call(self) -> ChatCall | None:
        """Return the rollout's next call of the model, or None once the rollout has ended.

        Raises: what the rollout raised.
        """
        event = self._events.get()
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, float):
            self._reward = event
            return None
        return event

    def _added(self, call: ChatCall) -> str:
        """Return the text of a call's messages that the policy has neither seen nor written.

        Raises: ValueError: a message that the policy has seen was changed.
        """
        earlier_messages = call.messages[: len(self._seen_messages)]
        if list(map(_wire, earlier_messages)) != list(map(_wire, self._seen_messages)):
            raise ValueError(
                "the environment has changed messages that the policy has already seen; an "
                "episode can only go on"
            )
        self._seen_messages = list(call.messages)
        return observation_text(call.messages[len(earlier_messages) :])

    def _run(self, task: Any) -> None:
        """Run the rollout in its thread; its reward, or what it raised, is the last event."""
        asyncio.set_event_loop(self._loop)
        try:
            self._events.put(self._loop.run_until_complete(self._rollout(task)))
        except BaseException as error:
            self._events.put(error)

    async def _rollout(self, task: Any) -> float:
        import verifiers.v1 as vf

        os.environ[_KEY_VARIABLE] = self._endpoint.api_key  # of this episode's process alone
        client = vf.EvalClientConfig(base_url=self._endpoint.base_url, api_key_var=_KEY_VARIABLE)
        async with self._environment.serving():
            episode = await self._environment.run_episode(
                task, vf.ModelContext(model=MODEL, client=client)
            )
        for error in [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]:
            raise RuntimeError(f"{error.type}: {error.message}")
        return float(next(t.reward for t in episode.traces if t.id == self._session))

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()


def _wire(message: dict[str, Any]) -> tuple[str, Any]:
    """Return the parts of a message that must not change: its role, and its text or None.

    The text of the policy's own messages is None, so that it is not compared.
    """
    role = message["role"]
    return role, None if role == "assistant" else observation_text([message])
