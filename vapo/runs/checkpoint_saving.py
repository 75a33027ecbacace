"""Writes checkpoints so that one is never half written: to another folder, which then gets its
name.

An error on any process is known to all of them before the next collective. A checkpoint may be
written in a thread while the next iteration runs (`BackgroundSaves`); then training only waits
until the state is copied.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from vapo.errors import InterruptedRunError
from vapo.errors.shown_text import shown_size
from vapo.files.whole_files import put_aside, replace_folder, sync
from vapo.runs.manifests import SHARDS_NAME, STATE_NAME, Manifest, describe_file, is_own
from vapo.runs.resuming import tell
from vapo.system.distributed import all_ranks, gather_objects, leave_together, rank
from vapo.system.host_memory import available_memory

_SPARE_BYTES = 1 << 20
_LARGE_BYTES = 2**30  # of a checkpoint: from here on one is kept beside the best
AFTER_A_SAVE = (
    "; earlier checkpoints are whole, and so are the iteration's rollouts: fix it, then "
    "resume with --ckpt_path last"
)
SAVE_ERRORS = (OSError, RuntimeError, ValueError, CheckpointException, SafetensorError)
"""What writing raises where a disk is full or away: torch and safetensors have their own."""


def write_checkpoint(
    state: dict[str, Any],
    final: Path,
    manifest: Manifest,
    *,
    sharded: bool,
    expected: int,
    group: dist.ProcessGroup | None = None,
) -> Manifest:
    """Write a state to the folder `final`; return the whole manifest. All processes call it.

    Args:
        manifest: the checkpoint's manifest, still without files.
        sharded: whether each process writes its own shards.
        expected: the bytes that must be free on the disk.
        group: the process group, in a thread that must not use the default group.

    Raises: InterruptedRunError on all processes; an earlier checkpoint of that name stays as it
        was.
    """
    aside = final.with_name(f".{final.name}.new")
    failure = f"cannot write the checkpoint {final}"
    files: dict[str, Any] = {}

    def make_room() -> None:
        aside.mkdir()  # what a killed run left there was removed at the start
        check_space(aside, DiskUse("the checkpoint", expected, "a lower checkpoints.keep"))

    def write() -> None:
        _write_state(state, aside, sharded, group)
        for path in sorted(aside.iterdir()):
            owner = path.name[2:].partition("_")[0] if path.suffix == ".distcp" else "0"
            if owner == str(rank()):  # its own shards; the first process has all that is shared
                sync(path)
                files[path.name] = describe_file(path)

    run_on_all_ranks(make_room, failure, after=AFTER_A_SAVE, first_only=True, group=group)
    run_on_all_ranks(write, failure, after=AFTER_A_SAVE, group=group)
    all_files = {k: entry for part in gather_objects(files, group) for k, entry in part.items()}
    manifest = replace(manifest, files=all_files)

    def put_in_place() -> None:
        manifest.write(aside)
        if os.path.lexists(final) and not is_own(final):
            tell(
                f"{final} is not a checkpoint of this run: it was moved to {put_aside(final).name} "
                "beside it"
            )
        replace_folder(aside, final)

    run_on_all_ranks(put_in_place, failure, after=AFTER_A_SAVE, first_only=True, group=group)
    return manifest


def _write_state(
    state: dict[str, Any], folder: Path, sharded: bool, group: dist.ProcessGroup | None
) -> None:
    """Write a state into a folder, in the layout that Lightning reads.

    Lightning's own writers are not used: the one for a file goes through memory and $TMPDIR, the
    one for shards uses the default process group.
    """
    name, shared = STATE_NAME, state
    if sharded:
        name, shared = SHARDS_NAME, dict(state)
        shards = {"state_dict": shared.pop("state_dict")}
        for index, optimizer in enumerate(shared.pop("optimizer_states")):
            shards[f"optimizer_{index}"] = optimizer
        dcp.save(shards, checkpoint_id=folder, process_group=group)
    if rank() == 0:
        with (folder / name).open("wb") as file:
            torch.save(shared, file)


def run_on_all_ranks(
    action: Callable[[], object],
    failure: str,
    *,
    after: str = "",
    first_only: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Run the action on every process, or only the first. If it fails on one, all raise.

    Raises: InterruptedRunError on all processes: the action failed. The message is `failure`, the
        reason and `after`.
    """
    problem = ""
    if rank() == 0 or not first_only:
        try:
            action()
        except SAVE_ERRORS as error:
            problem = error_reason(error)
    first_problem = next((text for text in gather_objects(problem, group) if text), None)
    if first_problem is not None:
        leave_together(group)
        # only the first process has the text
        raise InterruptedRunError(f"{failure}: {first_problem}{after}" if rank() == 0 else "")


def error_reason(error: BaseException) -> str:
    """Return the message of an error, or of the system's error that caused it, in one line."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}: {cause.filename}" if cause.filename else cause.strerror
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())[:600] or type(error).__name__


def expected_bytes(module: nn.Module) -> int:
    """Return a checkpoint's bytes: weights, buffers, and two moments per trained weight."""
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for b in module.buffers())
    return weights + 2 * trained + buffers


def host_has_room(num_bytes: int, available: int | None = None) -> bool:
    """Whether a copy of `num_bytes` takes at most half of the free memory of the host or container.

    `available` is the free memory in bytes; None: it is measured.
    """
    free = available_memory() if available is None else available
    return 2 * num_bytes <= free


def num_kept(keep: int | None, num_bytes: float) -> int:
    """Return how many of the newest checkpoints are kept: `keep`, else 2, or 1 if large."""
    return keep or (1 if num_bytes > _LARGE_BYTES else 2)


@dataclass(frozen=True)
class DiskUse:
    """Disk space for some `content`: the bytes, and a setting (`fix`) to reduce them."""

    content: str
    num_bytes: int
    fix: str = ""


def check_space(folder: Path, *uses: DiskUse, key: str = "output_dir") -> None:
    """Check that the folder's disk has room for all uses. `key` is the config key of the folder.

    Raises: OSError: the disk has no room.
    """
    free, large = shutil.disk_usage(folder).free, [use for use in uses if use.num_bytes]
    if free < sum(use.num_bytes for use in large) + _SPARE_BYTES:
        parts = ", ".join(f"{shown_size(use.num_bytes)} for {use.content}" for use in large)
        fixes = "".join(f"{use.fix}, or " for use in large if use.fix)
        raise OSError(
            f"it needs {parts}, and {folder} has {shown_size(free)} left; "
            f"set {fixes}{key} to a folder on a larger disk"
        )


def bytes_in(folder: Path) -> int:
    """Return the total size of all files in a folder; 0 if there is no folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class BackgroundSaves:
    """Saves checkpoints in a thread, one at a time. Each save's result or error is returned once.

        start(state, write) -> ... -> finish_pending(wait=True)

    The state is copied to buffers in host memory, which the next save uses again. (Lightning's
    `AsyncCheckpointIO` queues any number of copies, and writes tied weights twice.) Every process
    calls every method but `drain` at the same point of the run.
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
        """Copy the state, and call `write` with the copy in the thread.

        Raises: RuntimeError: the previous save has not been finished.
        """
        if self._future is not None:
            raise RuntimeError("the save before has not been finished")
        copied = self._stager.stage(state)
        self._future = self._executor.submit(self._write, copied, write)

    def _write(self, state: Any, write: Callable[[dict[str, Any]], Manifest]) -> Manifest:
        manifest = write(state)
        leave_together(self.group)
        return manifest

    def finish_pending(self, *, wait: bool) -> Manifest | None:
        """Return the manifest of the pending save, or None if no save is pending.

        Without `wait` it is also None while the save is not done on all processes.

        Raises: the error of the save.
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
        """Wait for a pending save and end the thread; return the save's error, or None."""
        future, self._future = self._future, None
        error = None if future is None else future.exception()
        self._executor.shutdown()
        self._stager.close()
        return error
