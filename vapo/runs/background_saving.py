"""A checkpoint written in a thread while the next iteration runs: training waits for a copy."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from vapo.errors import InterruptedRunError
from vapo.runs.manifests import Manifest
from vapo.system.distributed import all_ranks, leave_together


class BackgroundSaves:
    """One save at a time; its result, or its error, is taken once.

        start(state, write) -> ... -> settle(wait=True)

    The copy lies in host memory, in buffers that the next one uses again. Lightning's
    `AsyncCheckpointIO` queues any number of copies, and writes tied weights twice.
    Every process calls every method but `drain` at the same place.
    """

    def __init__(self) -> None:
        # the thread's collectives and those of training must not mix
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._future: Future[Manifest] | None = None

    def start(self, state: dict[str, Any], write: Callable[[dict[str, Any]], Manifest]) -> None:
        """Copy the state, and `write` the copy in the thread.

        Raises: RuntimeError when the save before has not been settled.
        """
        if self._future is not None:
            raise RuntimeError("the save before has not been settled")
        copied = self._stager.stage(state)
        self._future = self._executor.submit(self._write, copied, write)

    def _write(self, state: Any, write: Callable[[dict[str, Any]], Manifest]) -> Manifest:
        manifest = write(state)
        leave_together(self.group)
        return manifest

    def settle(self, *, wait: bool) -> Manifest | None:
        """What the save wrote; None if there is none or, unless waited for, it has not ended.

        Raises: what the save raised.
        """
        if self._future is None or not (wait or all_ranks(self._future.done())):
            return None
        try:
            return self._future.result()
        except InterruptedRunError:
            leave_together()
            raise
        finally:
            self._future = None

    def drain(self) -> BaseException | None:
        """Wait for the save, where the run ends by itself; its error is returned."""
        future, self._future = self._future, None
        error = None if future is None else future.exception()
        self._executor.shutdown()
        self._stager.close()
        return error
