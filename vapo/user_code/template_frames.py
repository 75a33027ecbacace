"""The protocol with the process that renders chat templates: frames, and limits of time and
memory."""

from __future__ import annotations

import struct
from typing import IO

LENGTH = struct.Struct("!Q")
MEMORY_BYTES = 2**30
SECONDS = 2.0
"""How much processor time one conversation may take, its template's compilation included."""
_MAX_CHARS = 2**18


def max_chars(frame: bytes) -> int:
    """Return the most characters that the text rendered for a request frame may have."""
    return _MAX_CHARS + 4 * len(frame)


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    """Write a frame's length, then the frame.

    Raises: OSError: the other side has ended.
    """
    stream.write(LENGTH.pack(len(frame)) + frame)
    stream.flush()


def read_frame(stream: IO[bytes], max_length: int = 2**62) -> bytes | None:
    """Return the next frame; None if the other side has ended or announces too many bytes."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    frame = stream.read(length) if length <= max_length else b""
    return frame if len(frame) == length else None
