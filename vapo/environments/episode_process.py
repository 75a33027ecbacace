"""What the process of one episode does: it asks the environment, and answers the trainer.

A reply is one line of JSON with the question's own ticket, not a pickle: nothing that a response
can make of this process is executed in the trainer, and what an environment itself writes into
the channel is no reply.
"""

from __future__ import annotations

import json
import os
import random
import sys
from multiprocessing.connection import Connection
from typing import Any

from vapo.environments.settings import MAX_OBSERVATION_CHARS, MakeEpisode
from vapo.system.child_process import failure_of, limit_memory, print_error, reward_problem
from vapo.system.shown_text import beginning


def run_episode(make: MakeEpisode, channel: Connection, *, shows_errors: bool) -> None:
    """Answer `(ticket, "reset", row)` and then each `(ticket, "step", text)`.

    It returns when the episode has ended or failed, or the trainer has hung up.
    """
    limit_memory()
    episode: Any = None
    is_over = False
    while not is_over:
        try:
            ticket, question, argument = channel.recv()
        except (EOFError, ConnectionError):
            break
        try:
            if question == "reset":
                _seed(argument.get("seed"))
                episode = make()
                reply = _checked(episode.reset(argument) or "", 0.0)
            else:
                reply = _step_reply(episode.step(argument))
        except BaseException as error:  # an environment may raise anything
            if shows_errors:
                print_error(error)
            reply = {"failure": failure_of(error)}
        is_over = reply.get("observation") is None
        _send(channel, {"ticket": ticket, **reply})
    _close(episode, shows_errors=shows_errors)


def _seed(seed: Any) -> None:
    """Make what the environment draws a function of the row; a fork has its host's state."""
    seed = seed if isinstance(seed, int) else 0
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _step_reply(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        return {
            "failure": "error: step(text) must return (observation or None, reward), it returned "
            f"{beginning(repr(answer), 80)}"
        }
    return _checked(*answer)


def _checked(observation: Any, reward: Any) -> dict[str, Any]:
    if observation is not None and not isinstance(observation, str):
        return {"failure": f"error: an observation is text, this is {type(observation).__name__}"}
    if observation is not None and len(observation) > MAX_OBSERVATION_CHARS:
        return {
            "failure": f"error: an observation of {len(observation)} characters; at most "
            f"{MAX_OBSERVATION_CHARS} are taken"
        }
    if isinstance(reward, (str, bytes)):
        return {
            "failure": f"error: a reward is a finite number, this is {beginning(repr(reward), 80)}"
        }
    number = float(reward)
    if (problem := reward_problem(number)) is not None:
        return {"failure": f"error: {problem}"}
    return {"observation": observation, "reward": number}


def _close(episode: Any, *, shows_errors: bool) -> None:
    """Call the environment's own `close()`, whose errors can change no reward any more."""
    close = getattr(episode, "close", None)
    if not callable(close):
        return
    try:
        close()
    except BaseException as error:
        if shows_errors:
            print_error(error)


def _send(channel: Connection, reply: dict[str, Any]) -> None:
    line = memoryview(json.dumps(reply).encode() + b"\n")
    while line:
        line = line[os.write(channel.fileno(), line) :]
