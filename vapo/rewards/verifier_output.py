"""What verifier processes print, for somebody who looks at single verdicts."""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import AbstractContextManager
from queue import SimpleQueue

MAX_BYTES = 16_384
"""Kept of what is printed between two `take`s: its beginning. The rest is counted."""


class VerifierOutput(AbstractContextManager["VerifierOutput"]):
    """A pipe that a thread is always reading, so that a verifier never waits for a reader.

    `take` writes a mark into it: what comes before it is all that was printed until then.

    `descriptor` is for the workers: their standard output and standard error.
    """

    def __init__(self) -> None:
        self._read, self.descriptor = os.pipe()
        self._mark = secrets.token_bytes(16)
        self._texts: SimpleQueue[str] = SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._keep_reading, daemon=True)
        self._thread.start()

    def take(self) -> str:
        """What was printed since the last call; a text that is too long says how much is left."""
        os.write(self.descriptor, self._mark)
        return self._texts.get()

    def __exit__(self, *_: object) -> None:
        """After the workers have ended."""
        self._is_closed = True
        self.take()
        self._thread.join()
        os.close(self._read)
        os.close(self.descriptor)

    def _keep_reading(self) -> None:
        kept, num_bytes, rest = b"", 0, b""
        while True:
            rest += os.read(self._read, 65_536)
            printed, mark, after = rest.partition(self._mark)
            if not mark:  # perhaps it has come in part
                printed, after = rest[: 1 - len(self._mark)], rest[1 - len(self._mark) :]
            rest, num_bytes = after, num_bytes + len(printed)
            kept += printed[: MAX_BYTES - len(kept)]
            if mark:
                left = f"\n... and {num_bytes - len(kept)} bytes more"
                self._texts.put(kept.decode("utf-8", "replace") + left * (num_bytes > len(kept)))
                kept, num_bytes = b"", 0
                if self._is_closed:
                    return
