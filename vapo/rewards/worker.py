"""One verifier process: `python -m vapo.rewards.worker CHANNEL CONTROL`, two descriptors.

It answers each task as soon as that task is done, so that the parent knows which one it is
working on when it hangs or dies. A reply is one line of JSON with the task's own ticket, not a
pickle: nothing that a response can make of this process is executed in the trainer, and what a
verifier itself writes into the channel is no reply. `supervision` ends what it leaves behind.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from vapo.errors import UserError
from vapo.rewards.hostile_text import guarded, install
from vapo.rewards.judgement import Verifier
from vapo.rewards.math_verify_package import import_package
from vapo.rewards.verifiers import VoteTask, make_verifier, math_vote_classes
from vapo.system.child_process import (
    channel_of,
    failure_of,
    limit_memory,
    print_error,
    printable,
    reward_problem,
)
from vapo.system.shown_text import hide
from vapo.system.supervision import fork_supervised


@dataclass(frozen=True)
class Settings:
    """What a worker needs to build its verifier."""

    kind: str
    pattern: str | None
    function: str | None
    timeout_s: float
    function_folder: str | None = None
    function_bytes: bytes | None = None
    """A function of the trainer's own notebook or script (`vapo.system.handed_functions`)."""
    percent: str = "either"
    """How `math` takes a percentage."""
    correct: float = 1.0
    """From this reward on a function's number is a correct response's."""
    shows_errors: bool = False
    """Also print the traceback of what the verifier raises; somebody reads its output."""
    passed: tuple[str, ...] = ()
    """Variables with credentials that the verifier gets."""
    hidden: tuple[tuple[str, str], ...] = ()
    """What its failures must not show: `vapo.system.shown_text.hide`."""
    ticket: str = ""
    """Ticket of the reply that the worker is ready, or why it is not."""


Task = tuple[str, str, Mapping[str, Any]] | VoteTask
"""Response text, answer, metadata; or a question of votes."""

Ticketed = tuple[str, Task]
"""A task and the ticket that its reply must carry."""


def judge(verifier: Verifier, task: Task, *, shows_errors: bool = False) -> dict[str, Any]:
    """Judge one task; the reply is a judgement, or the reason why there is none."""
    try:
        if isinstance(task, VoteTask):
            return {"classes": math_vote_classes(task)}
        judgement = verifier(*task)
    except (Exception, SystemExit) as error:  # a verifier may raise anything
        if shows_errors:
            print_error(error)
        return {"failure": failure_of(error)}
    if judgement.reward is not None:
        if not math.isfinite(judgement.reward):
            return {"failure": "nan"}
        if (problem := reward_problem(judgement.reward)) is not None:
            return {"failure": f"error: {problem}"}
    extracted = judgement.extracted
    return {
        "is_correct": judgement.is_correct,
        "reward": judgement.reward,
        "extracted": None if extracted is None else printable(extracted),
    }


def serve(connection: Connection) -> None:
    """Build the verifier, then answer chunks of tasks until the parent hangs up."""
    settings: Settings = connection.recv()
    hide(settings.hidden)
    try:
        verifier = make_verifier(
            settings.kind,
            pattern=settings.pattern,
            function=settings.function,
            folder=settings.function_folder,
            sent=settings.function_bytes,
            percent=settings.percent,
            correct=settings.correct,
        )
    except UserError as error:
        _send(connection, settings.ticket, {"failure": str(error)})
        return
    limit_memory()
    _send(connection, settings.ticket, {})
    if settings.kind == "reasoning_gym":
        importlib.import_module("reasoning_gym")  # seconds, which no verdict's time limit is for
    if settings.kind == "math_verify":
        import_package()
    # a user's own function may open files and start processes; ours have no reason to
    guard = nullcontext if settings.kind == "python" else guarded
    install()
    while True:
        tasks: list[Ticketed] = connection.recv()
        for ticket, task in tasks:
            with guard():
                reply = judge(verifier, task, shows_errors=settings.shows_errors)
            _send(connection, ticket, reply)


def _send(connection: Connection, ticket: str, reply: dict[str, Any]) -> None:
    line = json.dumps({"ticket": ticket, **reply}).encode() + b"\n"
    while line:
        line = line[os.write(connection.fileno(), line) :]


if __name__ == "__main__":
    channel, control = map(int, sys.argv[1:])
    fork_supervised(control, channel)
    try:
        serve(channel_of(channel))
    except (EOFError, ConnectionError):
        sys.exit(0)
