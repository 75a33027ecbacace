"""The errors that the command line prints without a traceback, and what it exits with.

`secret_rule.py` beside it says what is a secret, and `redactor.py` how a text is shown without it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class UserError(Exception):
    """Bad config, data, model folder or environment: names the key, file or row, and the fix."""

    exit_code: ClassVar[int] = 2


@contextmanager
def about(subject: str) -> Iterator[None]:
    """Let the `UserError`s of a block begin with what they are about: a key, a row of a grid."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{subject}: {error}") from None


def check_utf8(text: str, subject: str) -> None:
    """Check that a name or another text can be written as UTF-8, as all records are.

    A name whose bytes are none comes from the system with lone surrogates in it. Of the text only
    the first character at fault is shown.

    Raises: UserError
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{subject} is not text in UTF-8: its character {error.start + 1} is "
            f"{text[error.start]!a}; rename it, or write it in UTF-8"
        ) from None


class InterruptedRunError(UserError):
    """The run cannot continue, for a reason outside of it: a full disk, a process that was lost.

    The same command may succeed later (EX_TEMPFAIL of sysexits.h).
    """

    exit_code = 75


class StoppedRun(Exception):
    """The run ended itself: too many bad updates, or a watcher's limit. Says which and what next.

    Raised on all ranks alike.
    """

    exit_code: ClassVar[int] = 3


class StopRequested(BaseException):
    """A signal asked the run to stop, and it has reached a point where it can; no error."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.how_to_resume = ""
        super().__init__(signal.Signals(signum).name)

    @property
    def exit_code(self) -> int:
        """As shells and schedulers count: 129 SIGHUP, 130 SIGINT, 138 SIGUSR1, 143 SIGTERM."""
        return 128 + self.signum
