"""A file's lines, none of which fills the memory."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedIOBase

MOST_ROW_BYTES = 32 * 2**20
"""One row of a file, of whatever kind, may hold so much."""


def lines_of(file: BufferedIOBase) -> Iterator[bytes | None]:
    """The lines, each with its end; None in the place of one of more than `MOST_ROW_BYTES`."""
    while line := file.readline(MOST_ROW_BYTES + 1):
        is_whole = len(line) <= MOST_ROW_BYTES
        yield line if is_whole else None
        while not is_whole and not line.endswith(b"\n") and line:
            line = file.readline(MOST_ROW_BYTES)
