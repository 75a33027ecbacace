"""The host of a process's episodes: `python -m vapo.environments.host CHANNEL CONTROL`.

It imports the user's module once and forks a process for each episode, so that an episode costs
milliseconds, and one that hangs, crashes or fills its memory harms no other. The trainer keeps a
socket to each episode and never waits for this process (`processes`). What an episode started goes
with it (`episode_tree`). The supervisor above the host (`vapo.system.supervision`) ends everything
when the trainer is gone.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress

from vapo.environments.episode_process import run_episode
from vapo.environments.episode_tree import SEARCH_EVERY_S, EpisodeTree
from vapo.environments.settings import CLOSE_TIMEOUT_S, MESSAGE, HostSettings, MakeEpisode, Order
from vapo.environments.user_class import user_class
from vapo.errors import UserError
from vapo.system.child_process import channel_of
from vapo.system.shown_text import hide
from vapo.system.supervision import adopt_orphans, fork_supervised


class Host:
    """The open episodes, and those that have a moment left to close."""

    def __init__(self, channel: socket.socket, make: MakeEpisode, *, shows_errors: bool) -> None:
        self._channel = channel
        self._make = make
        self._shows_errors = shows_errors
        self._closing: dict[int, float] = {}
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler, so that it wakes
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._tree = EpisodeTree()

    def serve(self) -> None:
        """Start and end episodes as the trainer says, until it hangs up; then end them all."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while self._turn(selector):
                pass
            selector.unregister(self._channel)
            for episode in self._tree.open():
                self._closing.setdefault(episode, time.monotonic() + CLOSE_TIMEOUT_S)
            while self._tree.open():
                self._turn(selector)

    def _turn(self, selector: selectors.BaseSelector) -> bool:
        """Wait for something and do it; False once the trainer has hung up."""
        ends = list(self._closing.values())
        if self._tree.has_orphans:
            ends.append(time.monotonic() + SEARCH_EVERY_S)
        wait_s = max(0.0, min(ends) - time.monotonic()) if ends else None
        ready = [key.fileobj for key, _ in selector.select(wait_s)]
        if self._woken in ready:
            with suppress(BlockingIOError):
                os.read(self._woken, 4096)
        goes_on = self._channel not in ready or self._obey()
        for episode, at in list(self._closing.items()):
            if time.monotonic() >= at:
                self._tree.kill(episode)
                self._closing[episode] = time.monotonic() + SEARCH_EVERY_S
        for episode in self._tree.reap():
            self._closing.pop(episode, None)
        return goes_on

    def _obey(self) -> bool:
        """Take one order; False at the end of the channel."""
        message, descriptors, _, _ = socket.recv_fds(self._channel, MESSAGE.size, 1)
        if len(message) != MESSAGE.size:
            return False
        order, episode = MESSAGE.unpack(message)
        if order == Order.OPEN:
            self._open(episode, descriptors[0])
        elif order == Order.PING:
            _say(self._channel, {"ticket": f"{episode:x}"})
        elif episode in self._tree.open():
            grace = CLOSE_TIMEOUT_S if order == Order.END else 0.0
            self._closing.setdefault(episode, time.monotonic() + grace)
        return True

    def _open(self, episode: int, descriptor: int) -> None:
        if not self._tree.fork(episode):
            os.close(descriptor)
            return
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            os.close(self._woken)
            os.close(self._wake)
            run_episode(self._make, channel_of(descriptor), shows_errors=self._shows_errors)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # never back into the host's loop, nor to its exit handlers
            os._exit(0)


def serve(channel: socket.socket, settings: HostSettings) -> None:
    """Import what the settings name, say whether that went well, and be its host."""
    hide(settings.hidden)
    try:
        make = episode_maker(settings)
    except UserError as error:
        _say(channel, {"ticket": settings.ticket, "failure": str(error)})
        return
    host = Host(channel, make, shows_errors=settings.shows_errors)
    gc.collect()
    gc.freeze()  # so that a collection in an episode's process does not copy the host's memory
    _say(channel, {"ticket": settings.ticket})
    host.serve()


def episode_maker(settings: HostSettings) -> MakeEpisode:
    """What makes an episode's object. Raises: UserError: what the settings name is not there."""
    if settings.kind == "function":
        return user_class(settings)
    from vapo.environments.verifiers_episode import verifiers_episodes

    return verifiers_episodes(settings)


def _say(channel: socket.socket, reply: dict[str, str]) -> None:
    channel.sendall(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    number, control = map(int, sys.argv[1:])
    fork_supervised(control, number)
    adopt_orphans()
    connection = channel_of(number)
    with suppress(EOFError, ConnectionError):
        first: HostSettings = connection.recv()
        own = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()  # an episode's process closes the one that there is
        serve(own, first)
