"""Gradients of one whole minibatch through the real module and Trainer.

The gradients and metrics of a fixed minibatch, computed on one process or sharded over two.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.config.fits import STATE_TRACKING
from tests.judged import judged_batch
from tests.rollout_fixtures import make_rollouts
from vapo.advantages.estimators import estimate_advantages
from vapo.advantages.mismatch_correction import correct_mismatch, correction_metrics
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.diagnostics.iteration_metrics import iteration_metrics
from vapo.environments.contract import Verdict
from vapo.networks.head_layers import start_head
from vapo.system.distributed import rank, world_size
from vapo.training.datamodule import RolloutDataModule
from vapo.training.minibatches import Minibatch, make_minibatches
from vapo.training.module import VapoModule
from vapo.training.observers import mean_over_ranks
from vapo.training.strategy import make_strategy
from vapo.types import Rollout

NUM_ROLLOUTS = 16
ROOT = Path(__file__).parents[2]


class FixedRollouts(L.LightningDataModule):
    """Each rank's share of the same made-up rollouts, as one minibatch."""

    transfer_batch_to_device = RolloutDataModule.transfer_batch_to_device

    def __init__(self, config: FitConfig) -> None:
        super().__init__()
        self.config = config
        self.metrics: dict[str, float] = {}

    def made_up(self) -> tuple[list[Rollout], list[Verdict]]:
        return make_rollouts(NUM_ROLLOUTS, vocab_size=30)

    def train_dataloader(self) -> DataLoader[Minibatch]:
        module = self.trainer.lightning_module  # type: ignore[union-attr]
        assert isinstance(module, VapoModule)
        rollouts, verdicts = self.made_up()
        share = NUM_ROLLOUTS // world_size()
        rows = slice(rank() * share, (rank() + 1) * share)
        batch = judged_batch(
            rollouts[rows], verdicts[rows], rewards=self.config.rewards, max_response_tokens=32
        )
        algorithm = self.config.algorithm
        if self.config.critic.head.start == "first_batch":
            assert module.critic is not None
            start_head(module.critic, mean_over_ranks(batch.rewards))
        module.choose_microbatching(batch)
        evaluated = module.add_logprobs_and_values(batch, module.phase, with_entropy=False)
        assert evaluated.old_logprobs is not None
        evaluated = replace(  # neither of the two ratios is 1
            evaluated,
            rollout_logprobs=evaluated.old_logprobs,
            old_logprobs=evaluated.old_logprobs + (evaluated.rollout_logprobs + 0.5),
        )
        estimated = estimate_advantages(evaluated, module.phase, self.config, module.baseline)
        estimated = correct_mismatch(estimated, algorithm.mismatch)
        self.metrics = iteration_metrics(estimated, module.hyperparameters)
        self.metrics |= correction_metrics(estimated, algorithm.mismatch)
        minibatches = make_minibatches(
            estimated,
            num_minibatches=1,
            max_tokens=module.microbatching.tokens,
            pad_id=0,
            layout=module.layout,
            seed=rank(),
        )
        return DataLoader(minibatches, batch_size=None)  # type: ignore[arg-type]


class RecordsGradients(VapoModule):
    """Keeps the gradients, then steps, and keeps the norm of what the optimizer was given."""

    gradients: dict[str, torch.Tensor]
    step_metrics: dict[str, float]

    def _update(
        self, name: str, loss: torch.Tensor, minibatch: Minibatch, *, counted: bool
    ) -> dict[str, float]:
        self.gradients = getattr(self, "gradients", {})
        for key, parameter in getattr(self, name).named_parameters():
            if not parameter.requires_grad:
                continue
            grad = parameter.grad
            assert grad is not None, key
            full = grad.full_tensor() if isinstance(grad, DTensor) else grad
            self.gradients[f"{name}.{key}"] = full.clone()
        metrics = super()._update(name, loss, minibatch, counted=counted)
        optimizer = self.trainer.optimizers[("actor", "critic").index(name)]
        beta1 = optimizer.param_groups[0]["betas"][0]
        squares = 0.0
        for state in optimizer.state.values():
            first = state["exp_avg"] / (1 - beta1)  # after one step, the clipped gradient
            full = first.full_tensor() if isinstance(first, DTensor) else first
            squares += float(full.square().sum())
        return metrics | {f"{name}/clipped_norm": squares**0.5}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.step_metrics = {k: float(v) for k, v in outputs.items()}


def compute(num_processes: int, microbatch_tokens: int | str, *overrides: str) -> dict[str, Any]:
    """Gradients by parameter name, and the metrics that were logged."""
    config = config_on(num_processes, microbatch_tokens, *overrides)
    return fitted(RecordsGradients(config, pad_id=0), FixedRollouts(config), config)


def config_on(num_processes: int, microbatch_tokens: int | str, *overrides: str) -> FitConfig:
    """The state-tracking task's, with so many processes and so large micro-batches."""
    return copy.deepcopy(_loaded(num_processes, microbatch_tokens, *overrides))


@cache
def _loaded(num_processes: int, microbatch_tokens: int | str, *overrides: str) -> FitConfig:
    return load_config(
        FitConfig,
        STATE_TRACKING,
        [
            f"training.microbatch_tokens={microbatch_tokens}",
            f"trainer.devices={num_processes}",
            f"trainer.strategy={'fsdp' if num_processes > 1 else 'auto'}",
            "trainer.accelerator=cpu",
            *overrides,
        ],
    )


def fitted(
    module: RecordsGradients, datamodule: FixedRollouts, config: FitConfig
) -> dict[str, Any]:
    """Gradients and metrics of the module's one step on the minibatch."""
    torch.set_num_threads(1)
    num_processes = config.trainer.devices
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_processes,
        strategy=make_strategy(config.trainer),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, datamodule)
    assert trainer.world_size == num_processes
    return {
        "gradients": module.gradients,
        "metrics": {**module.step_metrics, **datamodule.metrics},
    }
