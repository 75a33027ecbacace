"""Functions in processes of their own, also as the ranks of one run, without paying for imports.

A fork server imports the package once for the tests of a pytest process, and every process is
forked from it; a new interpreter would load torch, Lightning and MLflow for seconds.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from tests.builders import free_port

ROOT = Path(__file__).parents[1]
PRELOADED = ["vapo.commands.fit", "mlflow", "mlflow.store.tracking.sqlalchemy_store"]
PRELOADED += ["transformers.models.qwen2.modeling_qwen2", "tests.preloaded", __name__]


def start(
    log: Path, environment: Mapping[str, str], function: Callable[..., int], *arguments: Any
) -> ForkServerProcess:
    """A process whose exit code is what the function returns, and which prints into `log`."""
    variables = {"OMP_NUM_THREADS": "1", **environment}
    process = _context().Process(target=_run, args=(log, variables, function, arguments))
    process.start()
    return process


def end(process: Any, timeout_s: float) -> int:
    """Its exit code; minus the signal that killed it."""
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"a process did not end within {timeout_s} s")
    return int(process.exitcode)


def rank_variables(num: int) -> list[dict[str, str]]:
    """The environment of each of `num` processes, as torchrun would make it."""
    shared = {
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "x",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num)]


class Ranks:
    """`num` processes, the ranks of one run, that call one function after the other.

    They start at the first call, and again after one that failed.
    """

    def __init__(self, num: int) -> None:
        self.num = num
        self._folder = tempfile.TemporaryDirectory()
        self._logs = [Path(self._folder.name) / f"rank{rank}.txt" for rank in range(num)]
        self._processes: list[ForkServerProcess] = []
        self._channels: list[Connection] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 280
    ) -> list[Any]:
        """What `function(*arguments)` returns on each rank: tensors, numbers, text.

        Raises: AssertionError: a rank failed or took too long; with the end of what it printed.
        """
        if not self._processes:
            self._start()
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        try:
            for channel in self._channels:
                channel.send((function, arguments))
            while missing := [self._channels[i] for i in range(self.num) if i not in results]:
                ready = wait(missing, deadline - time.monotonic())
                assert ready, f"no result within {timeout_s} s"
                for answered in ready:
                    assert isinstance(answered, Connection)
                    saved = io.BytesIO(answered.recv_bytes())
                    results[self._channels.index(answered)] = torch.load(saved, weights_only=True)
        except (AssertionError, EOFError, OSError) as error:
            self._end()
            printed = "\n".join(log.read_text()[-3000:] for log in self._logs)
            raise AssertionError(f"{error}\n{printed}") from None
        return [results[rank] for rank in range(self.num)]

    def _start(self) -> None:
        for log, variables in zip(self._logs, rank_variables(self.num), strict=True):
            ours, theirs = _context().Pipe()
            self._processes.append(start(log, variables, _serve, theirs))
            self._channels.append(ours)
            theirs.close()

    def _end(self) -> None:
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._channels, self._processes = [], []


def on_ranks(
    num: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 280
) -> list[Any]:
    """What `function(*arguments)` returns on each of `num` ranks that end with it."""
    with Ranks(num) as ranks:
        return ranks.run(function, *arguments, timeout_s=timeout_s)


def _context() -> ForkServerContext:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def _serve(channel: Connection) -> int:
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = channel.recv()
        except EOFError:
            return 0
        saved = io.BytesIO()
        torch.save(function(*arguments), saved)
        channel.send_bytes(saved.getvalue())


def _run(
    log: Path,
    environment: Mapping[str, str],
    function: Callable[..., int],
    arguments: tuple[Any, ...],
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    os.chdir(ROOT)
    try:
        code = function(*arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no clean-up of the server's, which the child inherited
