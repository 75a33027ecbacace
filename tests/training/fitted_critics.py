"""Runs whose critic is fitted by a regression, on one process or several, and what they saw."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.config.fits import STATE_TRACKING
from tests.judged import judged_batch
from tests.poisoned import PoisonedModule
from tests.rollout_fixtures import make_rollouts
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.networks.actor_critic import Actor, Critic, members_of
from vapo.networks.fitted_weights import current_fitted_weights
from vapo.system.distributed import full_state, rank, world_size
from vapo.system.progress import Progress
from vapo.training.datamodule import RolloutDataModule, iteration_of
from vapo.training.strategy import make_strategy
from vapo.types import IterationStart, RolloutBatch, TrainingBatch

PROBE = ("critic.kind=probe", "critic.init=policy", "critic.sampled_logprobs={}")
RIDGE = ("critic.ridge.window_batches=2", "critic.ridge.penalty=0.01")


class OtherRollouts:
    """Each rank's share of made-up rollouts that differ from one iteration to the next."""

    def __init__(self, config: FitConfig) -> None:
        self.config = config

    def next_batch(
        self, start: IterationStart, *, last: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        rollouts, verdicts = make_rollouts(16, vocab_size=30, seed=start.number)
        rows = slice(rank() * 16 // world_size(), (rank() + 1) * 16 // world_size())
        batch = judged_batch(
            rollouts[rows],
            verdicts[rows],
            group_size=4,
            rewards=self.config.rewards,
            max_response_tokens=32,
        )
        return batch, {}


@dataclass
class Seen(Callback):
    """Of each iteration its batch, the fitted weights with the bias after it, and its metrics."""

    batches: list[TrainingBatch]
    weights: list[Tensor]
    metrics: list[dict[str, float]]

    def __hash__(self) -> int:
        return id(self)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.batches.append(iteration_of(trainer).batch)
        for member in members_of(pl_module.critic):
            weights, bias = current_fitted_weights(member)
            self.weights.append(torch.cat([weights, bias[None]]).double())
        steps = pl_module.minibatch_metrics
        self.metrics.append({key: value for step in steps for key, value in step.items()})


@dataclass
class Run:
    module: PoisonedModule
    trainer: L.Trainer
    seen: Seen

    @property
    def critic(self) -> Critic:
        assert self.module.critic is not None
        return self.module.critic

    @property
    def actor(self) -> Actor:
        return self.module.actor


def run(
    *overrides: str,
    num_iterations: int = 3,
    checkpoint: Path | None = None,
    plan: Any = None,
    num_processes: int = 1,
) -> Run:
    """Iterations of two minibatches of 8 rows, in the policy phase."""
    sizes = ["components.group_sampling.num_prompts=4", "components.group_sampling.group_size=4"]
    config = load_config(
        FitConfig,
        STATE_TRACKING,
        [
            *sizes,
            "components.value_pretraining.enabled=false",
            "training.minibatch_size=8",
            "training.microbatch_tokens=60",
            f"training.num_iterations={num_iterations}",
            "trainer.accelerator=cpu",
            f"trainer.devices={num_processes}",
            *overrides,
        ],
    )
    torch.set_num_threads(1)
    module = PoisonedModule(config, pad_id=0)
    module.plan = plan or {}
    progress, seen = Progress(enabled=False), Seen([], [], [])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_processes,
        strategy=make_strategy(config.trainer),
        max_epochs=num_iterations,
        callbacks=[seen],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    made_up: Any = OtherRollouts(config)
    datamodule = RolloutDataModule(config, lambda module: made_up, progress=progress)
    trainer.fit(module, datamodule, ckpt_path=checkpoint, weights_only=True)
    return Run(module, trainer, seen)


def weights_and_metrics(num_processes: int, *overrides: str) -> dict[str, Any]:
    """What one rank saw, as plain values."""
    sharded = ("trainer.strategy=fsdp",) if num_processes > 1 else ()
    found = run(*overrides, *sharded, num_processes=num_processes)
    whole = {name: tensor.clone() for name, tensor in full_state(found.critic)}
    grams = found.module.ridge.grams if found.module.ridge is not None else []
    return {
        "weights": found.seen.weights,
        "metrics": [{k: float(v) for k, v in m.items()} for m in found.seen.metrics],
        "state": whole,
        "grams": grams,
    }
