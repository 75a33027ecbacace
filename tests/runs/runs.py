"""Runs of `vapo fit` in forked processes of their own, that can be killed.

`hook` names a function of `tests.runs.hooks` that is called in the child before the command.
"""

from __future__ import annotations

import importlib
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests import forked
from tests.config.fits import ON_STATE_TRACKING
from vapo.runs.checkpoints import read_checkpoint

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
TIMEOUT_S = 900


def where(folder: Path, store: Path) -> list[str]:
    return [f"output_dir={folder / 'runs'}", f"tracking.uri={store}"]


def start(
    log: Path,
    *arguments: str,
    hook: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> ForkServerProcess:
    """`vapo fit` on the tiny task, with its output in `log`."""
    return forked.start(log, environment or {}, _fit, list(arguments), hook)


def end(process: Any, timeout_s: float = TIMEOUT_S) -> int:
    """Its exit code; minus the signal that killed it."""
    return forked.end(process, timeout_s)


def fit(log: Path, *arguments: str, hook: tuple[str, ...] = ()) -> int:
    return end(start(log, *arguments, hook=hook))


def two_ranks(
    folder: Path, *arguments: str, hooks: tuple[tuple[str, ...], ...] = ((), ())
) -> list[ForkServerProcess]:
    """Two processes, as torchrun would start them, that share the model."""
    devices = ["trainer.devices=2", "trainer.strategy=fsdp"]
    return [
        start(
            folder / f"log{rank}.txt",
            *devices,
            *arguments,
            hook=hooks[rank],
            environment=variables,
        )
        for rank, variables in enumerate(forked.rank_variables(2))
    ]


def _fit(arguments: list[str], hook: tuple[str, ...]) -> int:
    from vapo import cli

    if hook:
        hooks = importlib.import_module("tests.runs.hooks")
        getattr(hooks, hook[0])(*hook[1:])
    return cli.main(["fit", *ON_STATE_TRACKING, *TINY, *arguments])


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
