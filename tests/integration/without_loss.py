"""A run through the real module, datamodule and Trainer whose minibatches lack losses to a plan.

Run as `python -m tests.integration.without_loss OUT NUM_PROCESSES`: every rank writes what it saw
to OUT/rank0.json, OUT/rank1.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

from tests.poisoned import ROOT, Notebook, Snapshots, fixed_rollouts
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.system.distributed import rank
from vapo.system.progress import Progress
from vapo.system.sharding import make_strategy
from vapo.training.callbacks.recording import Recording
from vapo.training.module import VapoModule
from vapo.types import RolloutBatch

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


class Masked(VapoModule):
    """Takes losses away from a batch that has everything else."""

    def estimate_advantages(self, batch: RolloutBatch) -> None:
        super().estimate_advantages(batch)
        assert batch.advantages is not None
        plan = list(EXPECTED)[int(self.iteration)]
        none = torch.zeros_like(batch.response_mask)
        if plan == "all filtered":
            batch.loss_mask = none
        if plan.startswith("no policy loss"):
            batch.policy_mask = none
        if plan.startswith("advantages 0"):
            batch.advantages = torch.zeros_like(batch.advantages)
        if plan.endswith("none correct"):
            batch.is_correct = torch.zeros_like(batch.is_correct)
        if plan.startswith("one response"):
            batch.loss_mask = batch.response_mask.clone()
            batch.loss_mask[int(rank() == 0) :] = False


def run(num_processes: int, *overrides: str) -> dict[str, Any]:
    """An iteration of two minibatches for each entry of the plan; what this rank saw."""
    config = load_config(
        FitConfig,
        [ROOT / "conf/vapo.yaml"],
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
    module = Masked(config, pad_id=0)
    progress, notebook, snapshots = Progress(enabled=False), Notebook(), Snapshots()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_processes,
        strategy=make_strategy(config.trainer),
        max_epochs=len(EXPECTED),
        reload_dataloaders_every_n_epochs=1,
        callbacks=[snapshots, Recording(notebook, progress)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, fixed_rollouts(config, progress))
    iterations = [logged for logged in notebook.logged if "progress/iteration" in logged]
    return {"steps": snapshots.steps, "iterations": iterations}


if __name__ == "__main__":
    folder, processes = Path(sys.argv[1]), int(sys.argv[2])
    seen = run(processes)
    (folder / f"rank{rank()}.json").write_text(json.dumps(seen))
