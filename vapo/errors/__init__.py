"""The errors that the command line prints without a traceback, and their exit codes.

`secret_rule.py` decides what is a secret, and `redactor.py` removes secrets from texts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class UserError(Exception):
    """Raised if the user's config, data, model folder or environment is wrong.

    The message names the key, file or row, and the fix.
    """

    exit_code: ClassVar[int] = 2


@contextmanager
def about(subject: str) -> Iterator[None]:
    """Begin the messages of `UserError`s in the block with `subject`, such as a key."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{subject}: {error}") from None


def check_utf8(text: str, subject: str) -> None:
    """Check that a text, such as a file's name, can be written as UTF-8, as all records are.

    (The system's name of a file has lone surrogates if its bytes are not UTF-8.)

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
    """Raised if the run cannot continue for an outside reason, as a full disk or lost process.

    The same command may succeed later (EX_TEMPFAIL of sysexits.h).
    """

    exit_code = 75


class DoesNotFit(UserError):
    """A config needs more memory than the GPU has that `vapo estimate` was asked about.

    It has no message: the command has printed what is missing, and what to change.
    """

    exit_code = 4


class StoppedRun(Exception):
    """Raised on all ranks if the run ends itself: too many bad updates, or a watcher's limit.

    The message says which of these it was, and what to do next.
    """

    exit_code: ClassVar[int] = 3


class StopRequested(BaseException):
    """Raised at a safe point of the run after a signal asked it to stop. It is not an error."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.how_to_resume = ""
        super().__init__(signal.Signals(signum).name)

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect after the signal: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signum
