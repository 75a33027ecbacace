"""A run through the real module, datamodule and Trainer whose minibatches lack losses to a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import torch

from tests.config.fits import STATE_TRACKING
from tests.poisoned import FixedRollouts, Notebook, Snapshots
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.system.distributed import rank
from vapo.system.progress import Progress
from vapo.training.callbacks.recording import Recording
from vapo.training.datamodule import RolloutDataModule
from vapo.training.iteration import IterationRunner
from vapo.training.module import VapoModule
from vapo.training.strategy import make_strategy
from vapo.types import EvaluatedBatch, IterationStart, TrainingBatch

# (actor, critic) of each iteration's two minibatches: whether a token has a loss of theirs
EXPECTED: dict[str, list[tuple[bool, bool]]] = {
    "whole": [(True, True), (True, True)],
    "all filtered": [(False, False), (False, False)],
    "no policy loss, none correct": [(False, True), (False, True)],
    "no policy loss, some correct": [(True, True), (True, True)],
    "advantages 0, none correct": [(False, True), (False, True)],
    "one response on the first rank": [(True, True), (False, False)],
    "whole again": [(True, True), (True, True)],
}


def with_masks(batch: TrainingBatch, mask: torch.Tensor) -> TrainingBatch:
    """The batch with this mask for every loss."""
    return replace(batch, loss_mask=mask, policy_mask=mask, entropy_mask=mask, value_mask=mask)


class MaskedRunner(IterationRunner):
    """Takes losses away from a batch that has everything else."""

    def estimate_and_correct(self, batch: EvaluatedBatch, start: IterationStart) -> TrainingBatch:
        made = super().estimate_and_correct(batch, start)
        plan = list(EXPECTED)[start.number - 1]
        none = torch.zeros_like(made.response_mask)
        if plan == "all filtered":
            made = with_masks(made, none)
        if plan.startswith("no policy loss"):
            made = replace(made, policy_mask=none)
        if plan.startswith("advantages 0"):
            made = replace(made, advantages=torch.zeros_like(made.token_rewards))
        if plan.endswith("none correct"):
            made = replace(made, is_correct=torch.zeros_like(made.is_correct))
        if plan.startswith("one response"):
            one = made.response_mask.clone()
            one[int(rank() == 0) :] = False
            made = with_masks(made, one)
        return made


class MaskedRollouts(RolloutDataModule):
    def make_runner(self, module: VapoModule, *, total: int) -> IterationRunner:
        rollouts = self.make_rollouts(module)
        return MaskedRunner(self.config, rollouts, module, progress=self.progress, total=total)


def run(num_processes: int, *overrides: str) -> dict[str, Any]:
    """An iteration of two minibatches for each entry of the plan; what this rank saw."""
    config = load_config(
        FitConfig,
        STATE_TRACKING,
        [
            "components.value_pretraining.enabled=false",
            "components.group_sampling.num_prompts=4",
            "components.group_sampling.group_size=4",
            "training.minibatch_size=8",
            f"training.num_iterations={len(EXPECTED)}",
            "training.microbatch_tokens=60",
            "actor.optimizer.weight_decay=0.1",
            f"trainer.devices={num_processes}",
            f"trainer.strategy={'fsdp' if num_processes > 1 else 'auto'}",
            "trainer.accelerator=cpu",
            *overrides,
        ],
    )
    torch.set_num_threads(1)
    module = VapoModule(config, pad_id=0)
    progress, notebook, snapshots = Progress(enabled=False), Notebook(), Snapshots()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_processes,
        strategy=make_strategy(config.trainer),
        max_epochs=len(EXPECTED),
        callbacks=[snapshots, Recording(notebook, progress)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    made_up = FixedRollouts(config)
    trainer.fit(module, MaskedRollouts(config, lambda module: made_up, progress=progress))
    iterations = [logged for logged in notebook.logged if "progress/iteration" in logged]
    return {"steps": snapshots.steps, "iterations": iterations}
