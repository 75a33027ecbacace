"""Supervised training of one network: what `vapo sft` and `vapo reward-model` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from vapo.config import RewardModelConfig, SftConfig
from vapo.config.loading import flatten, to_yaml
from vapo.config.schema import OptimizerConfig
from vapo.progress import Progress
from vapo.prompts import PromptSplit
from vapo.rewards import make_scorer
from vapo.rewards.scorer import Scorer
from vapo.seeding import derive_seed
from vapo.tracking import RunLogger, make_run_logger

Batch = Any
LossFunction = Callable[[Batch], tuple[Tensor, dict[str, float]]]


@contextmanager
def recorded_run(
    config: SftConfig | RewardModelConfig, command: str, prompts: PromptSplit
) -> Iterator[tuple[Progress, Scorer, RunLogger]]:
    """Display, verifier and MLflow run of a supervised command, its config recorded."""
    with (
        Progress() as progress,
        make_scorer(
            config.rewards, max_response_tokens=config.rollouts.max_response_tokens
        ) as scorer,
        make_run_logger(
            config.tracking,
            run_name=config.tracking.run_name or f"{command}-seed{config.seed}",
            tags={"command": command},
            note=progress.note,
        ) as logger,
    ):
        logger.log_config(to_yaml(config), flatten(config))
        progress.note(prompts.report.describe())
        yield progress, scorer, logger


class Batches(IterableDataset[Batch]):
    """`num_steps` batches from seeded permutations of the examples, pass after pass."""

    def __init__(
        self,
        examples: Sequence[Any],
        collate: Callable[[list[Any]], Batch],
        *,
        batch_size: int,
        num_steps: int,
        seed: int,
    ) -> None:
        self.examples, self.collate = examples, collate
        self.batch_size, self.num_steps, self.seed = batch_size, num_steps, seed

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[Batch]:
        order: list[int] = []
        passes = 0
        for _ in range(self.num_steps):
            while len(order) < self.batch_size:
                generator = torch.Generator().manual_seed(derive_seed(self.seed, "pass", passes))
                order += torch.randperm(len(self.examples), generator=generator).tolist()
                passes += 1
            rows, order = order[: self.batch_size], order[self.batch_size :]
            yield self.collate([self.examples[row] for row in rows])


class SupervisedModule(L.LightningModule):
    """A network, its loss on a batch, and AdamW with warmup, a constant part and linear decay."""

    def __init__(
        self,
        network: nn.Module,
        loss_function: LossFunction,
        optimizer: OptimizerConfig,
        *,
        num_steps: int,
        decay_fraction: float = 0.0,
    ) -> None:
        super().__init__()
        self.network = network.train()
        self.loss_function = loss_function
        self.options = optimizer
        self.num_steps = num_steps
        self.decay_steps = max(round(decay_fraction * num_steps), 1) if decay_fraction else 0

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        loss, metrics = self.loss_function(batch)
        return {"loss": loss, "metrics": metrics}

    def configure_optimizers(self) -> Any:
        options = self.options
        optimizer = AdamW(
            self.network.parameters(),
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
        )
        schedule = LambdaLR(optimizer, self.lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def lr_factor(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / max(self.options.warmup_steps, 1))
        if not self.decay_steps:
            return warmup
        return min(warmup, max(self.num_steps - step, 0) / self.decay_steps)


class SupervisedRecording(Callback):
    """Progress and metrics of every optimizer step."""

    def __init__(self, logger: RunLogger, progress: Progress, *, every_n_steps: int = 20) -> None:
        self.logger, self.progress, self.every_n_steps = logger, progress, every_n_steps
        self._stages = ExitStack()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._advance = self._stages.enter_context(
            self.progress.stage("training", total=trainer.num_training_batches, unit="steps")
        )

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: object,
        batch_idx: int,
    ) -> None:
        self._advance(1)
        if batch_idx % self.every_n_steps == 0 or batch_idx + 1 == trainer.num_training_batches:
            self.logger.log_metrics(outputs["metrics"], step=trainer.global_step)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stages.close()


def train_supervised(
    module: SupervisedModule,
    batches: Batches,
    *,
    logger: RunLogger,
    progress: Progress,
    accelerator: str,
    precision: Any,
) -> None:
    """Run all batches once."""
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=1,
        precision=precision,
        max_epochs=1,
        gradient_clip_val=module.options.max_grad_norm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SupervisedRecording(logger, progress)],
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
