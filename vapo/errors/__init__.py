"""The errors that the command line prints without a traceback, and their exit codes.

`secret_rule.py` decides what is a secret, and `redactor.py` removes secrets from texts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class UserError(Exception):
    """The user's config, data, model folder or environment is wrong.

    The message names the key, file or row, and the fix.
    """

    exit_code: ClassVar[int] = 2


@contextmanager
def about(subject: str) -> Iterator[None]:
    """Let the messages of a block's `UserError`s begin with `subject`, as a key or a grid's row."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{subject}: {error}") from None


def check_utf8(text: str, subject: str) -> None:
    """Check that a name or another text can be written as UTF-8, as all records are.

    If the bytes of a file's name are not UTF-8, the system's name has lone surrogates in it.

    Args:
        subject: what the text is, for the message.

    Raises: UserError: it cannot; the message shows only the first wrong character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{subject} is not text in UTF-8: its character {error.start + 1} is "
            f"{text[error.start]!a}; rename it, or write it in UTF-8"
        ) from None


class InterruptedRunError(UserError):
    """The run cannot continue for a reason outside of it, as a full disk or a lost process.

    The same command may succeed later (EX_TEMPFAIL of sysexits.h).
    """

    exit_code = 75


class DoesNotFit(UserError):
    """A config needs more memory than the GPU has that `vapo estimate` was asked about.

    It has no message: the command has printed what is missing, and what to change.
    """

    exit_code = 4


class StoppedRun(Exception):
    """The run ended itself: too many bad updates, or a watcher's limit.

    The message says which of these it was, and what to do next. All ranks raise it.
    """

    exit_code: ClassVar[int] = 3


class StopRequested(BaseException):
    """A signal asked the run to stop, and the run has reached a point where it can. It is not an
    error."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.how_to_resume = ""
        super().__init__(signal.Signals(signum).name)

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect: 129 SIGHUP, 130 SIGINT, 138 SIGUSR1, 143 SIGTERM."""
        return 128 + self.signum
