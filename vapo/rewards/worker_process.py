"""The trainer's side of one verifier process: tasks go out, replies with tickets come back."""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vapo.rewards.worker import Settings, Task
from vapo.system.child_process import reward_problem
from vapo.system.shown_text import redacted, visible
from vapo.system.supervised_process import START_TIMEOUT_S, SupervisedProcess, ticketed_reply

MAX_REPLY_BYTES = 2**16
GARBLED = "garbled: something other than the worker wrote into its channel"


class Worker(SupervisedProcess):
    """One child process and the tasks that it has been given."""

    def __init__(self, settings: Settings, output: int | None = None) -> None:
        super().__init__("vapo.rewards.worker", output, passed=settings.passed)
        self.ready = False
        self.pending: deque[int] = deque()
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self._received = b""
        self._tickets = deque([secrets.token_hex(8)])
        self.connection.send(replace(settings, ticket=self._tickets[0]))

    def send(self, tasks: Sequence[Task]) -> None:
        """Raises: OSError when it is gone, or does not take them within `SEND_TIMEOUT_S`."""
        # Without a request: the end of the channel, or someone else's output. A child of a process
        # that was killed holds the channel open a moment longer.
        if self.has_sent() or self.process.poll() is not None:
            raise ConnectionError
        tickets = [secrets.token_hex(8) for _ in tasks]
        self._tickets.extend(tickets)
        self.connection.send(list(zip(tickets, tasks, strict=True)))

    def has_sent(self) -> bool:
        """Whether there is something to receive."""
        return bool(self._received) or self.connection.poll()

    def receive(self) -> list[dict[str, Any]]:
        """Replies that have come whole; never waits for the rest of one.

        The last is `{"broken": why}` where no more can come: the process is gone, or what came
        is not the reply to the task that it has.
        """
        try:
            received = os.read(self.connection.fileno(), MAX_REPLY_BYTES)
        except OSError:
            received = b""
        *lines, self._received = (self._received + received).split(b"\n")
        replies: list[dict[str, Any]] = []
        for line in lines:
            ticket = self._tickets.popleft() if self._tickets else ""
            reply = read_reply(line, ticket, is_first=not self.ready and not replies)
            if reply is None:
                return [*replies, {"broken": GARBLED}]
            replies.append(reply)
        if not received:
            replies.append({"broken": "crash"})
        elif len(self._received) > MAX_REPLY_BYTES:
            replies.append({"broken": GARBLED})
        return replies


def read_reply(line: bytes, ticket: str, *, is_first: bool = False) -> dict[str, Any] | None:
    """Parse the reply in one line of the channel; None when it does not have this ticket.

    The first is empty, or has a `failure`: whether the worker is ready.
    """
    reply = ticketed_reply(line, ticket)
    if reply is None:
        return None
    if set(reply) == {"failure"}:
        failure = reply["failure"]
        return {"failure": visible(redacted(failure))} if isinstance(failure, str) else None
    if is_first:
        return None if reply else reply
    if set(reply) == {"classes"}:
        classes = reply["classes"]
        are_indices = isinstance(classes, list) and all(
            type(index) is int and 0 <= index < len(classes) for index in classes
        )
        return reply if are_indices else None
    reward, extracted = reply.get("reward"), reply.get("extracted")
    is_verdict = (
        set(reply) == {"is_correct", "reward", "extracted"}
        and isinstance(reply["is_correct"], bool)
        and (reward is None or _is_reward(reward))
        and (extracted is None or isinstance(extracted, str))
    )
    return reply if is_verdict else None


def _is_reward(reward: Any) -> bool:
    try:
        return isinstance(reward, (int, float)) and reward_problem(float(reward)) is None
    except OverflowError:  # an integer of hundreds of digits
        return False
