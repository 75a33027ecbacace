"""Writes files that are complete or missing, locks files and folders, and checks access to them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any

from vapo.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give the block a path beside `path` to write to, which is renamed to `path` at its end.

    So `path` is never half written, and unchanged if the block raises an error. The new file is on
    the disk when the block has ended.
    """
    aside = path.with_name(f".{path.name}.new")
    if aside.is_symlink():  # it would be written where the link leads
        aside.unlink()
    try:
        yield aside
        sync(aside)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file with `write`, so that it is never half written (`whole_file`)."""
    with whole_file(path) as aside:
        write(aside)


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def point_link(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`. An old link is replaced in one step."""
    aside = link.with_name(f".{link.name}.new")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    aside.replace(link)
    sync(link.parent)


def replace_folder(aside: Path, final: Path) -> None:
    """Rename the folder `aside` to `final`. A folder that `final` was before is removed."""
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        final.rename(old)
    aside.rename(final)
    sync(final.parent)
    with suppress(OSError):  # what is left of it is removed when the run begins again
        remove(old)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all its contents. If it is a link, only the link is removed.

    Raises: OSError: it cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def put_aside(path: Path) -> Path:
    """Rename a file or folder to the first free name such as `NAME.other`; return the new path."""
    names = (f"{path.name}.other{'' if number == 1 else number}" for number in count(1))
    return path.rename(next(x for x in map(path.with_name, names) if not os.path.lexists(x)))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def try_lock(file: IO[Any], *, with_children: bool = False) -> bool:
    """Lock an open file until it is closed; return whether that succeeded.

    Args:
        with_children: whether processes that inherit the open file hold the lock too, also after
            its owner was killed. Otherwise this process alone holds it: no process that it started
            keeps the file locked, and a second lock by the same process succeeds.

    Raises: UserError: the file is on a disk without locks.
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


def why_disk_is_full(error: BaseException | None) -> str | None:
    """Return an error's message if a full disk or an exhausted quota caused it, else None.

    (Errors of safetensors have the system's error number only in their text.)
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        if any(f"(os error {number})" in str(error) for number in _FULL):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def check_regular_file(path: Path) -> None:
    """Check that a path is a regular file or does not exist. Links are followed.

    Opening a pipe would wait for a writer, and a device may have no end.

    Raises: UserError: it is a folder, a named pipe, a device or a socket.
    """
    try:
        mode = path.stat().st_mode
    except OSError:  # it is not there, or may not be looked at: whoever opens it says so
        return
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise UserError(f"{path} is {kind}: give a regular file")


_FLAGS = {
    "rb": os.O_RDONLY,
    "ab": os.O_RDWR | os.O_CREAT | os.O_APPEND,
    "wb": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
}


def open_inside(folder: Path, name: str, mode: str, *, buffering: int = -1) -> IO[bytes]:
    """Open a file inside a folder or a subfolder of it. Links inside are not followed.

    Raises: OSError: it cannot be opened or is not a regular file. It never waits for a named pipe.
    """
    inside = _open_folder(folder, name)
    try:
        flags = _FLAGS[mode] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(Path(name).name, flags, 0o666, dir_fd=inside)
    finally:
        os.close(inside)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "it is not a regular file", str(folder / name))
    return os.fdopen(descriptor, mode, buffering)


def read_bounded(path: Path, max_bytes: int) -> bytes | None:
    """Return a file's content, or None if it has more than `max_bytes`.

    Raises: OSError: it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    return content if len(content) <= max_bytes else None


def read_inside(folder: Path, name: str, max_bytes: int) -> bytes | None:
    """Return the content of a file in a folder, or None if missing, a link or above `max_bytes`.

    Raises: OSError: it is there, but cannot be read now.
    """
    try:
        with open_inside(folder, name, "rb") as file:
            if os.fstat(file.fileno()).st_size > max_bytes:
                return None
            return file.read(max_bytes)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO):
            return None
        raise


def remove_inside(folder: Path, name: str) -> None:
    """Remove a file in a folder if it exists. If it is a link, only the link is removed.

    Raises: OSError: it cannot be removed.
    """
    with suppress(FileNotFoundError):
        inside = _open_folder(folder, name)
        try:
            os.unlink(Path(name).name, dir_fd=inside)
        finally:
            os.close(inside)


def _open_folder(folder: Path, name: str) -> int:
    """Return a descriptor of the folder with the file: `folder`, or a subfolder, not a link."""
    subfolder, _, _ = name.rpartition("/")
    no_link = os.O_NOFOLLOW if subfolder else 0
    return os.open(folder / subfolder, os.O_RDONLY | os.O_DIRECTORY | no_link)


@contextmanager
def folder_locked(folder: Path, wait_s: float = 30.0) -> Iterator[None]:
    """Lock a folder in the block, so one process at a time works there. The work must be short.

    A network disk may lock files but no folders: there a file `.lock` in the folder is locked.

    Raises: UserError: another process holds the lock for longer than `wait_s`. OSError: neither can
        be locked.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            is_locked = _is_locked(descriptor)
        except OSError:
            os.close(descriptor)
            raise
    except OSError:
        descriptor = os.open(folder / ".lock", flags, 0o666)
        is_locked = _is_locked(descriptor)
    try:
        deadline = time.monotonic() + wait_s
        while not is_locked:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{folder}: another process has had it locked for {wait_s:g} s: end that one, "
                    "or choose another folder"
                )
            time.sleep(0.02)
            is_locked = _is_locked(descriptor)
        yield
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def why_not_writable(folder: Path) -> str | None:
    """Return why a folder cannot be written or made, or None if its permissions allow it.

    Nothing is made. So a full disk is not noticed, nor one that refuses what its permissions allow.
    """
    around = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not around.is_dir():
        return f"{around} is not a folder"
    if not os.access(around, os.W_OK | os.X_OK):
        return f"{around} may not be written by this user"
    return None


def read_line(text: str) -> Any:
    """Parse a line of JSON and return its value. An object with the same key twice is an error.

    Raises: ValueError: it is not JSON, or has such a key. RecursionError: it is nested too deep.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise ValueError(f"the key {key!r:.80} is there twice")
        members[key] = value
    return members
