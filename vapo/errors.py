"""What the command line prints without a traceback."""

from typing import ClassVar


class UserError(Exception):
    """Bad config, data, model folder or environment: names the key, file or row, and the mend."""


class StoppedRun(Exception):
    """The run ended itself: too many bad updates, or a watcher's limit. Says which and what next.

    Raised on all ranks alike.
    """

    exit_code: ClassVar[int] = 3
