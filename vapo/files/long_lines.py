"""Reads a file's lines with a limit on the length of each, so that none fills the memory."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedIOBase

MOST_ROW_BYTES = 32 * 2**20
"""The most bytes of one row of a file, of whatever kind."""


def lines_of(file: BufferedIOBase) -> Iterator[bytes | None]:
    """Yield a file's lines with their ends; None in place of one above `MOST_ROW_BYTES`."""
    while line := file.readline(MOST_ROW_BYTES + 1):
        is_whole = len(line) <= MOST_ROW_BYTES
        yield line if is_whole else None
        while not is_whole and not line.endswith(b"\n") and line:
            line = file.readline(MOST_ROW_BYTES)
