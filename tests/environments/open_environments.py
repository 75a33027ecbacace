"""Environments of the tests, and episodes played with them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vapo.config.environments import EnvironmentConfig
from vapo.config.kinds import make
from vapo.config.schema import FitConfig
from vapo.environments.contract import EpisodeKey, Reply
from vapo.environments.processes import ProcessEnvironments, make_environments

HOSTILE = "tests.environments.hostile_environments"


@contextmanager
def environments(name: str, **options: Any) -> Iterator[ProcessEnvironments]:
    """The environments of a class of `hostile_environments`, or at another place."""
    function = name if ":" in name else f"{HOSTILE}:{name}"
    block = make(EnvironmentConfig, kind="function", function=function, **options)
    made = make_environments(FitConfig(environment=block))
    assert isinstance(made, ProcessEnvironments)
    try:
        yield made
    finally:
        made.close()


def next_replies(envs: ProcessEnvironments, number: int, within_s: float = 10.0) -> list[Reply]:
    """So many replies, by their keys; fails where they do not come."""
    replies: list[Reply] = []
    until = time.monotonic() + within_s
    while len(replies) < number:
        assert time.monotonic() < until, f"only {replies} after {within_s} s"
        replies += envs.poll(0.2)
    assert len(replies) == number
    return sorted(replies, key=lambda reply: reply.key)


def play(
    envs: ProcessEnvironments, texts: Sequence[str], key: EpisodeKey = (0,), **row: Any
) -> list[Reply]:
    """The replies of one episode, up to the one that ends it; it is given up after the texts."""
    envs.begin(key, {"prompt": "", "answer": "", "seed": 0, **row})
    replies = next_replies(envs, 1)
    for text in texts:
        if replies[-1].observation is None:
            break
        envs.step(key, text)
        replies += next_replies(envs, 1)
    envs.end(key)
    return replies
