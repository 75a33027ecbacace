"""Environments in processes of their own, as the trainer uses them.

One host (`host`) imports the user's module and forks a process for each open episode. The trainer
has a socket to each episode and waits on all of them at once, so that a slow one delays no other.
Nothing here waits without a limit: for an answer, for room to send a question, for an end.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import socket
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from vapo.environments.contract import EpisodeKey, Reply
from vapo.environments.data_row import data_row
from vapo.environments.host_process import HostProcess
from vapo.environments.settings import MAX_OBSERVATION_CHARS, HostSettings, Order
from vapo.system.child_process import printable, reward_problem
from vapo.system.shown_text import redacted, visible
from vapo.system.supervised_process import limit_sending, ticketed_reply
from vapo.types import Prompt

MAX_REPLY_BYTES = 12 * MAX_OBSERVATION_CHARS + 4096
"""JSON takes up to 12 bytes for a character."""

GARBLED = "garbled: something other than the environment's answer came through its channel"

_READ_BYTES = 2**20
_REST_S = 1.0
"""A reply that has begun in time has so long to come whole: it can only while somebody reads."""


@dataclass
class _Episode:
    key: EpisodeKey
    number: int
    channel: Connection
    ticket: str | None = None
    """Of the open question; None: there is none."""
    deadline: float = math.inf
    received: bytearray = field(default_factory=bytearray)
    has_begun: bool = False
    has_answered: bool = False
    """Whether its process was there: that of an episode which never answers may not have begun."""


class ProcessEnvironments:
    """The `Environments` of one process; used by one thread at a time.

    Args:
        capacity: episodes that may be open at a time.
        timeout_s: time limit of one reset or step.
        output: file descriptor to which the environments print; None: that is discarded.

    Raises:
        UserError: what the settings name cannot be imported or called.
    """

    gives_verdicts = False

    def __init__(
        self,
        settings: HostSettings,
        *,
        capacity: int,
        timeout_s: float,
        output: int | None = None,
    ) -> None:
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._episodes: dict[EpisodeKey, _Episode] = {}
        self._failed: list[Reply] = []
        self._numbers = itertools.count()
        self._host = HostProcess(settings, output)
        self._finalizer = weakref.finalize(
            self, _close_all, self._host, self._episodes, os.getpid()
        )

    @property
    def capacity(self) -> int:
        return self._capacity

    def reset(self, key: EpisodeKey, prompt: Prompt) -> None:
        """See `Environments.reset`. Raises: as `begin`."""
        self.begin(key, data_row(prompt))

    def begin(self, key: EpisodeKey, row: Mapping[str, Any]) -> None:
        """Begin an episode on what the environment is given.

        Raises:
            ValueError: the key is in use, or as many episodes are open as may be.
            UserError: the host has ended and does not start again.
        """
        if key in self._episodes or len(self._episodes) >= self._capacity:
            raise ValueError(f"episode {key} cannot begin: {len(self._episodes)} are open")
        ours, theirs = socket.socketpair()
        limit_sending(ours)
        episode = _Episode(key, next(self._numbers), Connection(ours.detach()))
        self._episodes[key] = episode
        with theirs:
            self._host.open(episode.number, theirs)
        self._ask(episode, "reset", dict(row))

    def step(self, key: EpisodeKey, text: str, *, has_ended: bool = True) -> None:
        """Give the episode what the policy wrote in its turn.

        Raises:
            ValueError: the episode is not open, or has not answered the last question.
        """
        episode = self._episodes.get(key)
        if episode is None or episode.ticket is not None:
            raise ValueError(f"episode {key} is not waiting for a turn")
        self._ask(episode, "step", text)

    def end(self, key: EpisodeKey) -> None:
        """The episode is over, or given up; ended and unknown ones are ignored."""
        if key in self._episodes:
            self._drop(self._episodes[key], Order.END)

    def poll(self, timeout_s: float) -> list[Reply]:
        """The replies that have come; waits at most so long for the first, 0: not at all.

        At once if no question is open.
        """
        until = time.monotonic() + timeout_s
        replies, self._failed = self._failed, []
        while asked := {e.channel: e for e in self._episodes.values() if e.ticket is not None}:
            first = min(until, *(episode.deadline for episode in asked.values()))
            wait_s = 0.0 if replies else max(0.0, first - time.monotonic())
            ready = wait(list(asked), timeout=wait_s)
            for channel, episode in asked.items():
                reply = self._receive(episode) if channel in ready else self._overdue(episode)
                replies += [] if reply is None else [reply]
            if replies or time.monotonic() >= until:
                break
        return replies

    def close(self) -> None:
        """End everything that was started; a second call does nothing."""
        self._finalizer()

    def _ask(self, episode: _Episode, question: str, argument: Any) -> None:
        episode.ticket = secrets.token_hex(8)
        episode.has_begun = False
        try:
            episode.channel.send((episode.ticket, question, argument))
        except OSError as error:
            is_full = isinstance(error, BlockingIOError)  # it does not read what it is sent
            self._failed.append(self._failure(episode, "timeout" if is_full else "crash"))
        episode.deadline = time.monotonic() + self._timeout_s

    def _receive(self, episode: _Episode) -> Reply | None:
        """What has come of its reply; None as long as that is not whole."""
        try:
            received = os.read(episode.channel.fileno(), _READ_BYTES)
        except OSError:
            received = b""
        if not received:
            return self._failure(episode, "crash")
        line, end, rest = received.partition(b"\n")
        episode.received += line
        if len(episode.received) > MAX_REPLY_BYTES or rest:
            return self._failure(episode, GARBLED)
        if not end:
            return None
        fields = read_reply(bytes(episode.received), episode.ticket or "")
        if fields is None:
            return self._failure(episode, GARBLED)
        episode.received.clear()
        episode.ticket, episode.has_answered = None, True
        reply = Reply(episode.key, **fields)
        if reply.observation is None:
            self._drop(episode, Order.END)
        return reply

    def _overdue(self, episode: _Episode) -> Reply | None:
        now = time.monotonic()
        if now <= episode.deadline:
            return None
        if episode.received and not episode.has_begun:
            episode.has_begun, episode.deadline = True, now + _REST_S
            return None
        if not episode.has_answered:
            self._host.replace_if_frozen()
        return self._failure(episode, "timeout")

    def _failure(self, episode: _Episode, failure: str) -> Reply:
        self._drop(episode, Order.KILL)
        return Reply(episode.key, failure=failure)

    def _drop(self, episode: _Episode, order: Order) -> None:
        del self._episodes[episode.key]
        _hang_up(episode)
        self._host.end(episode.number, order)


def read_reply(line: bytes, ticket: str) -> dict[str, Any] | None:
    """The fields of the `Reply` that one line of a channel is; None if it has not this ticket."""
    reply = ticketed_reply(line, ticket)
    if reply is None:
        return None
    if set(reply) == {"failure"}:
        failure = reply["failure"]
        return (
            {"failure": visible(redacted(failure), keep="")} if isinstance(failure, str) else None
        )
    observation, reward = reply.get("observation"), reply.get("reward")
    if set(reply) != {"observation", "reward"} or not isinstance(reward, (int, float)):
        return None
    try:
        reward = float(reward)
    except OverflowError:  # an integer of hundreds of digits
        return None
    if reward_problem(reward) is not None:
        return None
    if observation is None:
        return {"observation": None, "reward": reward}
    if not isinstance(observation, str) or len(observation) > MAX_OBSERVATION_CHARS:
        return None
    return {"observation": printable(observation), "reward": reward}


def _hang_up(episode: _Episode) -> None:
    """End the channel for all who have a copy of it, so that the episode's process hears of it."""
    with suppress(OSError), socket.socket(fileno=os.dup(episode.channel.fileno())) as channel:
        channel.shutdown(socket.SHUT_RDWR)
    episode.channel.close()


def _close_all(host: HostProcess, episodes: dict[EpisodeKey, _Episode], owner: int) -> None:
    if os.getpid() != owner:  # a process that was forked from it ends
        return
    had_open = bool(episodes)
    for episode in episodes.values():
        _hang_up(episode)
    episodes.clear()
    host.close(waits=had_open)
