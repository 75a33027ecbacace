"""A run through the real module, datamodule and Trainer in which numbers go bad to a plan.

On one process or several; the poison is on the last rank alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.config.fits import STATE_TRACKING
from tests.judged import judged_batch
from tests.rollout_fixtures import make_rollouts
from vapo.config import FitConfig, resolve
from vapo.config.loading import load_config
from vapo.errors import StoppedRun
from vapo.runs.run_dirs import RunDir
from vapo.system.distributed import rank, world_size
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.training.callbacks.recording import Watch
from vapo.training.datamodule import RolloutDataModule
from vapo.training.minibatches import Microbatch
from vapo.training.module import VapoModule
from vapo.training.strategy import make_strategy
from vapo.types import EvaluatedBatch, IterationStart, Phase, RolloutBatch

NUM_ROLLOUTS = 16
NAN, INF = float("nan"), float("inf")

# (iteration, minibatch), or (iteration, a number of the batch): what becomes of it
PLAN: dict[tuple[int, int | str], Any] = {
    (2, 0): ("actor", NAN),
    (3, 1): ("critic", INF),
    (4, "old_logprobs"): {1: NAN},
    (5, "rewards"): {0: NAN},
    (5, "old_values"): {2: -INF},
    (6, 0): ("values", NAN),
    (7, "old_values"): dict.fromkeys(range(NUM_ROLLOUTS), NAN),
    **{(iteration, minibatch): ("actor", NAN) for iteration in (9, 10) for minibatch in (0, 1)},
}


class PoisonedModule(VapoModule):
    plan: Mapping[tuple[int, int | str], Any] = {}
    minibatch = 0

    def poison(self, what: str) -> float | None:
        """What the number called so becomes now, on this rank."""
        name, value = self.plan.get((self.start.number, self.minibatch), ("", 0.0))
        return value if name == what and rank() == world_size() - 1 else None

    def add_logprobs_and_values(
        self, batch: RolloutBatch, phase: Phase, *, with_entropy: bool
    ) -> EvaluatedBatch:
        evaluated = super().add_logprobs_and_values(batch, phase, with_entropy=with_entropy)
        for (iteration, name), rows in self.plan.items():
            if iteration != self.start.number or not isinstance(name, str):
                continue
            for row, value in rows.items() if rank() == world_size() - 1 else ():
                if row < len(batch):
                    getattr(evaluated, name)[(row, 0) if name != "rewards" else row] = value
        return evaluated

    def training_step(self, minibatch: Any, batch_idx: int) -> dict[str, float]:
        self.minibatch = batch_idx
        return super().training_step(minibatch, batch_idx)

    def _value_forward(self, micro: Microbatch) -> dict[str, Tensor]:
        found = super()._value_forward(micro)
        if (value := self.poison("values")) is not None:
            factor = torch.ones_like(found["values"])
            factor[0, 0] = value
            return {"values": found["values"] * factor}
        return found

    def _update(self, name: str, *args: Any, **kwargs: Any) -> dict[str, float]:
        if (value := self.poison(name)) is not None:
            for parameter in getattr(self, name).parameters():
                if parameter.grad is not None and (grad := local(parameter.grad)).numel():
                    grad.view(-1)[-1] = value
        return super()._update(name, *args, **kwargs)


class FixedRollouts:
    """Each rank's share of the same made-up rollouts in every iteration."""

    def __init__(self, config: FitConfig) -> None:
        self.config = config

    def next_batch(
        self, start: IterationStart, *, last: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        rollouts, verdicts = make_rollouts(NUM_ROLLOUTS, vocab_size=30)
        share = NUM_ROLLOUTS // world_size()
        rows = slice(rank() * share, (rank() + 1) * share)
        batch = judged_batch(
            [replace(r, response_text="a response") for r in rollouts[rows]],
            verdicts[rows],
            group_size=resolve(self.config).group_size,
            rewards=self.config.rewards,
            max_response_tokens=32,
        )
        return batch, {}


def fixed_rollouts(config: FitConfig, progress: Progress) -> RolloutDataModule:
    made_up = FixedRollouts(config)
    return RolloutDataModule(config, lambda module: made_up, progress=progress)


class Snapshots(Callback):
    """For each mini-batch: which networks' weights and Adam states changed, and the counters."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.before = state_of(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        after = state_of(trainer, pl_module)
        changed = {
            key: not all(torch.equal(a, b) for a, b in zip(old, after[key], strict=True))
            for key, old in self.before.items()
        }
        schedules = [s.last_epoch for s in pl_module.lr_schedulers()]
        self.steps.append(
            {
                "changed": changed,
                "schedules": schedules,
                "global_step": trainer.global_step,
                "policy_steps": int(pl_module.policy_steps),
                "is_finite": all(bool(t.isfinite().all()) for ts in after.values() for t in ts),
                "outputs": {key: str(value) for key, value in outputs.items()},
            }
        )


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_of(trainer: L.Trainer, module: VapoModule) -> dict[str, list[Tensor]]:
    """Copies of this rank's weights and Adam states."""
    found: dict[str, list[Tensor]] = {}
    for name, optimizer in zip(("actor", "critic"), trainer.optimizers, strict=True):
        network: nn.Module = getattr(module, name)
        state = network.state_dict()
        found[name] = [local(tensor).clone() for tensor in state.values()]
        found[f"{name}_adam"] = [
            local(tensor).clone() for one in optimizer.state.values() for tensor in one.values()
        ]
    return found


class Notebook(RunLogger):
    """What would go to MLflow."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.tagged: list[dict[str, str]] = []

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.logged.append(dict(metrics))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self.tagged.append(dict(tags))


def run(
    out: Path,
    num_processes: int,
    plan: Mapping[tuple[int, int | str], Any],
    *overrides: str,
) -> dict[str, Any]:
    """Ten iterations of two mini-batches, or fewer; what this rank saw."""
    config = load_config(
        FitConfig,
        STATE_TRACKING,
        [
            "components.value_pretraining.enabled=false",
            "components.group_sampling.num_prompts=4",
            "components.group_sampling.group_size=4",
            "training.minibatch_size=8",
            "training.num_iterations=10",
            "training.microbatch_tokens=60",
            "watch.max_bad_updates=3",
            f"trainer.devices={num_processes}",
            f"trainer.strategy={'fsdp' if num_processes > 1 else 'auto'}",
            "trainer.accelerator=cpu",
            *overrides,
        ],
    )
    torch.set_num_threads(1)
    module = PoisonedModule(config, pad_id=0)
    module.plan = plan
    progress, notebook, snapshots = Progress(enabled=False), Notebook(), Snapshots()
    notes: list[str] = []
    progress.note = notes.append  # type: ignore[method-assign, assignment]
    datamodule = fixed_rollouts(config, progress)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_processes,
        strategy=make_strategy(config.trainer),
        max_epochs=config.training.num_iterations,
        callbacks=[snapshots, Watch(config.watch, module.faults, RunDir(out), notebook, progress)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    stopped = ""
    try:
        trainer.fit(module, datamodule)
    except StoppedRun as stop:
        stopped = str(stop)
    return {
        "steps": snapshots.steps,
        "metrics": notebook.logged,
        "tags": notebook.tagged,
        "notes": notes,
        "stopped": stopped,
        "iterations": int(module.iteration),
        "totals": dict(module.faults.totals),
    }
