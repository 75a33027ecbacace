"""Functions in processes of their own, also as the ranks of one run, without paying for imports.

A fork server imports the package once for the tests of a pytest process, and every process is
forked from it; a new interpreter would load torch, Lightning and MLflow for seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PRELOADED = ["vapo.commands.fit", "mlflow", "mlflow.store.tracking.sqlalchemy_store", __name__]


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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = {
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "x",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num)]


def on_ranks(
    num: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 280
) -> list[Any]:
    """What `function(*arguments)` returns on each of `num` ranks: tensors, numbers, text.

    Raises: AssertionError: a rank failed; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.txt" for rank in range(num)]
        results = [log.with_suffix(".pt") for log in logs]
        processes = [
            start(log, variables, _saved, result, function, arguments)
            for log, result, variables in zip(logs, results, rank_variables(num), strict=True)
        ]
        try:
            deadline = time.monotonic() + timeout_s
            codes = [end(process, deadline - time.monotonic()) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        assert codes == [0] * num, "\n".join(log.read_text()[-3000:] for log in logs)
        return [torch.load(result, weights_only=True) for result in results]


def _context() -> ForkServerContext:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def _saved(result: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    torch.set_num_threads(1)
    torch.save(function(*arguments), result)
    return 0


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
