"""Runs of `vapo fit` in processes of their own that can be killed, without paying for imports.

A fork server imports the package once; each run is forked from it. `hook` names a function of
`tests.runs.hooks` that is called in the child before the command.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import sys
import traceback
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from vapo.runs.checkpoints import read_checkpoint

ROOT = Path(__file__).parents[2]
TINY = [
    "components.value_pretraining.num_iterations=2",
    "components.value_pretraining.min_iterations=1",
    "components.group_sampling.num_prompts=4",
    "components.group_sampling.group_size=2",
    "training.num_iterations=3",
    "training.minibatch_size=4",
    "rollouts.max_response_tokens=12",
    "data.train.num_examples=32",
    "data.heldout.num_examples=4",
    "evaluation.k=1",
    "evaluation.every_n_iterations=2",
    "evaluation.num_table_rows=2",
    "rewards.num_workers=1",
    "trainer.num_threads=1",
    "trainer.accelerator=cpu",
    "actor.optimizer.lr=1e-3",
    "actor.optimizer.warmup_steps=0",
]
NUM_STEPS = 10  # two minibatches an iteration, five iterations
PRELOADED = ["vapo.commands.fit", "mlflow", "mlflow.store.tracking.sqlalchemy_store", __name__]
TIMEOUT_S = 900


def context() -> ForkServerContext:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def where(folder: Path, store: Path) -> list[str]:
    return [f"output_dir={folder / 'runs'}", f"tracking.uri={store}"]


def start(
    log: Path,
    *arguments: str,
    hook: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> ForkServerProcess:
    """`vapo fit` on the tiny task, with its output in `log`."""
    process = context().Process(
        target=_fit,
        args=(log, list(arguments), hook, {"OMP_NUM_THREADS": "1", **(environment or {})}),
    )
    process.start()
    return process


def end(process: Any, timeout_s: float = TIMEOUT_S) -> int:
    """Its exit code; minus the signal that killed it."""
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"a run did not end within {timeout_s} s")
    return int(process.exitcode)


def fit(log: Path, *arguments: str, hook: tuple[str, ...] = ()) -> int:
    return end(start(log, *arguments, hook=hook))


def two_ranks(
    folder: Path, *arguments: str, hooks: tuple[tuple[str, ...], ...] = ((), ())
) -> list[ForkServerProcess]:
    """Two processes, as torchrun would start them, that share the model."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "x",
    }
    devices = ["trainer.devices=2", "trainer.strategy=fsdp"]
    return [
        start(
            folder / f"log{rank}.txt",
            *devices,
            *arguments,
            hook=hooks[rank],
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]


def _fit(
    log: Path, arguments: list[str], hook: tuple[str, ...], environment: dict[str, str]
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    os.chdir(ROOT)
    from vapo import cli

    if hook:
        hooks = importlib.import_module("tests.runs.hooks")
        getattr(hooks, hook[0])(*hook[1:])
    try:
        code = cli.main(["fit", "--config", "conf/vapo.yaml", *TINY, *arguments])
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no clean-up of the server's, which the child inherited


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def state(run: Path) -> dict[str, Any]:
    """The last checkpoint's contents, those aside that a resumed run may change."""
    contents = read_checkpoint(run / "checkpoints/last.ckpt")
    return {
        name: contents.get(name)
        for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")
    }


def history(run: Path, store: Path) -> dict[str, list[tuple[int, float]]]:
    """Every metric's (step, value) pairs in MLflow, in the order of their arrival."""
    import json

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store}/mlflow.db")
    run_id = json.loads((run / "run.json").read_text())["mlflow_run_id"]
    keys = client.get_run(run_id).data.metrics
    return {
        key: [(m.step, m.value) for m in client.get_metric_history(run_id, key)] for key in keys
    }
