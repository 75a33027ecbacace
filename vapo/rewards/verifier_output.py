"""What verifier processes print, for somebody who looks at single verdicts."""

from __future__ import annotations

import os
import select
import threading
from contextlib import AbstractContextManager

MAX_BYTES = 16_384
"""Kept of what is printed between two `take`s: its beginning. The rest is counted."""

_MAX_READS = 64


class VerifierOutput(AbstractContextManager["VerifierOutput"]):
    """A pipe that is always being read, so that a verifier never waits for a reader.

    A thread reads while the verifier works. `take` itself reads what is there still, so that it
    has all that a process printed before its reply came.

    `descriptor` is for the workers: their standard output and standard error.
    """

    def __init__(self) -> None:
        self._read, self.descriptor = os.pipe()
        self._stopped, self._stop = os.pipe()
        os.set_blocking(self._read, False)
        self._lock = threading.Lock()
        self._kept, self._num_bytes = bytearray(), 0
        self._thread = threading.Thread(target=self._keep_reading, daemon=True)
        self._thread.start()

    def take(self) -> str:
        """What was printed since the last call; a text that is too long says how much is left."""
        with self._lock:
            for _ in range(_MAX_READS):  # a process of the verifier's may never stop printing
                if not self._read_some():
                    break
            text = self._kept.decode("utf-8", "replace")
            num_left = self._num_bytes - len(self._kept)
            self._kept, self._num_bytes = bytearray(), 0
        return f"{text}\n... and {num_left} bytes more" if num_left else text

    def close(self) -> None:
        """After the workers have ended."""
        os.close(self._stop)
        self._thread.join()
        for descriptor in (self._read, self.descriptor, self._stopped):
            os.close(descriptor)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep_reading(self) -> None:
        while True:
            readable, _, _ = select.select([self._read, self._stopped], [], [])
            if self._stopped in readable:
                return
            with self._lock:
                self._read_some()

    def _read_some(self) -> bool:
        try:
            chunk = os.read(self._read, 65_536)
        except BlockingIOError:  # `take` was faster, or there is no more
            return False
        self._num_bytes += len(chunk)
        self._kept += chunk[: MAX_BYTES - len(self._kept)]
        return bool(chunk)
