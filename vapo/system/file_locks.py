"""Locks that tell processes of one host apart; the operating system frees a dead process's lock."""

from __future__ import annotations

import fcntl
from typing import IO, Any

from vapo.errors import UserError


def try_lock(file: IO[Any], *, with_children: bool = False) -> bool:
    """Lock an open file until it is closed; whether that was possible.

    Args:
        with_children: processes that inherit the open file hold the lock too, also after its
            owner was killed. Otherwise it is the process's own: nothing that the process started
            keeps the file locked, and a second lock by the same process succeeds.

    Raises: UserError when the file lies on a disk without locks.
    """
    lock = fcntl.flock if with_children else fcntl.lockf
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX leaves it open which of the two it is
        return False
    except OSError as error:
        raise UserError(
            f"{file.name}: cannot be locked ({error.strerror}); choose a folder on another disk"
        ) from None
    return True
