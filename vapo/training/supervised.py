"""Supervised training of one network, for `vapo sft` and `vapo reward-model`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from vapo.config import FitConfig, RewardModelConfig, SftConfig
from vapo.config.schema import OptimizerConfig
from vapo.config.sources import default_name
from vapo.config.written import flatten_written, to_yaml
from vapo.errors import UserError
from vapo.files.made_folders import missing_folders, taken_back_if_refused
from vapo.prompts.load import PromptSplit
from vapo.rewards.scorer import Scorer, make_scorer
from vapo.runs.checkpoint_saving import DiskUse, check_space
from vapo.system.process import derive_seed
from vapo.system.progress import Progress
from vapo.tracking.inputs import recorded_tracking
from vapo.tracking.logger import RunLogger
from vapo.training.optimizers import make_optimizer, make_scheduler

_LOGGED_EVERY = 20  # optimizer steps


@dataclass(frozen=True)
class SupervisedBatch:
    """One optimizer step's data: micro-batches, and the divisor of their summed losses."""

    microbatches: list[Any]
    denominator: int

    def to(self, device: torch.device) -> SupervisedBatch:
        return SupervisedBatch([m.to(device) for m in self.microbatches], self.denominator)


@contextmanager
def recorded_run(
    config: SftConfig | RewardModelConfig,
    sampling: FitConfig,
    command: str,
    prompts: PromptSplit,
    network: nn.Module,
) -> Iterator[tuple[Progress, Scorer, RunLogger]]:
    """Open display, scorer and MLflow run of a supervised command, and log its config.

    Args:
        sampling: the part of the config that sampling needs (`sampling_config`).
        command: the command's name, which is a tag of the MLflow run.
        network: the network that is trained. Its size tells whether the disk has room for it.
    """
    export_dir = Path(config.export_dir).expanduser()
    with taken_back_if_refused(missing_folders(export_dir)):
        require_room(export_dir, network)
        with (
            Progress() as progress,
            make_scorer(sampling) as scorer,
            RunLogger(
                recorded_tracking(config),
                run_name=config.tracking.run_name or default_name(config, command),
                tags={"command": command},
                note=progress.note,
                journal=export_dir / "tracking",
            ) as logger,
        ):
            differs = {"_differs": config.sources.differences()}
            logger.log_config(to_yaml(config), differs | flatten_written(config))
            progress.note(prompts.report.describe())
            yield progress, scorer, logger
    logger.discard_journal()  # a supervised run is not resumed


def require_room(export_dir: Path, network: nn.Module) -> None:
    """Check that the disk has room for the network, which is written once training is over.

    Raises: UserError: the disk has no room.
    """
    export_dir.mkdir(parents=True, exist_ok=True)
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    try:
        check_space(export_dir, DiskUse("the model", weights), key="export_dir")
    except OSError as error:
        raise UserError(f"the training cannot begin: {error}") from None


@dataclass(eq=False)
class Batches(IterableDataset[SupervisedBatch]):
    """A dataset that yields `num_steps` batches of examples, each made by `collate`.

    Each pass over the examples has its own seeded order. A batch may reach from one pass into the
    next.
    """

    examples: Sequence[Any]
    collate: Callable[[list[Any]], SupervisedBatch]
    batch_size: int
    num_steps: int
    seed: int

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[SupervisedBatch]:
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
    """A LightningModule that trains a network by AdamW.

    The learning rate warms up, stays, and falls linearly. The gradient of a step does not depend on
    how its batch is cut into micro-batches.

    Args:
        summed_loss: returns a micro-batch's loss, summed and not yet divided by the denominator.
        num_steps: the number of optimizer steps.
        decay_fraction: the share of the steps, at the end, in which the learning rate falls to 0.
    """

    def __init__(
        self,
        network: nn.Module,
        summed_loss: Callable[[Any], Tensor],
        optimizer: OptimizerConfig,
        *,
        num_steps: int,
        decay_fraction: float = 0.0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.network = network.train()
        self.summed_loss = summed_loss
        self.options = optimizer
        self.num_steps = num_steps
        self.decay_steps = max(round(decay_fraction * num_steps), 1) if decay_fraction else 0

    def training_step(self, batch: SupervisedBatch, batch_idx: int) -> dict[str, float]:
        """Run one optimizer step and return its loss as `mean_loss`."""
        optimizer, schedule = cast(LightningOptimizer, self.optimizers()), self.lr_schedulers()
        optimizer.zero_grad()
        total = 0.0
        for microbatch in batch.microbatches:
            loss = self.summed_loss(microbatch) / batch.denominator
            self.manual_backward(loss)
            total += float(loss.detach())
        clip_grad_norm_(self.network.parameters(), self.options.max_grad_norm)
        optimizer.step()
        cast(LRScheduler, schedule).step()
        return {"mean_loss": total}

    def configure_optimizers(self) -> tuple[list[Optimizer], list[LambdaLR]]:
        optimizer = make_optimizer(self.network, self.options)
        schedule = make_scheduler(
            optimizer,
            self.options.warmup_steps,
            num_steps=self.num_steps,
            decay_steps=self.decay_steps,
        )
        return [optimizer], [schedule]


@dataclass(eq=False)
class SupervisedRecording(Callback):
    """Shows the progress, and logs the loss of every 20th step and the last as `loss_name`."""

    logger: RunLogger
    progress: Progress
    loss_name: str
    _stages: ExitStack = field(default_factory=ExitStack, init=False)

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
        if batch_idx % _LOGGED_EVERY == 0 or batch_idx + 1 == trainer.num_training_batches:
            metrics = {self.loss_name: outputs["mean_loss"]}
            self.logger.log_metrics(metrics, step=trainer.global_step)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stages.close()


def train_supervised(
    module: SupervisedModule,
    batches: Batches,
    *,
    loss_name: str,
    logger: RunLogger,
    progress: Progress,
    accelerator: str,
    precision: Any,
) -> None:
    """Train the module's network on all batches in one process, and log the loss as `loss_name`."""
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=1,
        precision=precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SupervisedRecording(logger, progress, loss_name)],
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
