"""Held-out evaluation before the first, at every n-th and after the last policy iteration."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import Callback

from vapo.evaluation import evaluate
from vapo.runs.summary import describe_score, interval_of
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.training.datamodule import datamodule_of, iteration_of
from vapo.training.module import VapoModule
from vapo.types import Phase


class Evaluation(Callback):
    """Keeps the first and the latest result; `best.ckpt` is chosen by `eval/avg_at_k`."""

    def __init__(self, logger: RunLogger, progress: Progress) -> None:
        self.logger = logger
        self.progress = progress
        self.first: dict[str, float] = {}
        self.latest: dict[str, float] = {}

    def state_dict(self) -> dict[str, dict[str, float]]:
        return {"first": self.first, "latest": self.latest}

    def load_state_dict(self, state_dict: dict[str, dict[str, float]]) -> None:
        self.first, self.latest = state_dict["first"], state_dict["latest"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.first:
            self.first = self.run(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        start = iteration_of(trainer).start
        if start.phase is Phase.POLICY_OPTIMIZATION:
            finished, config = start.policy_iterations + 1, pl_module.config
            is_last = finished == config.training.num_iterations
            if is_last or finished % config.evaluation.every_n_iterations == 0:
                self.run(trainer, pl_module)
        pl_module.log("eval/avg_at_k", self.latest["eval/avg_at_k"], logger=False, sync_dist=True)

    def run(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float]:
        """Evaluate the current policy; log its metrics and a table of sample responses."""
        assert isinstance(pl_module, VapoModule)
        config, source = pl_module.config, datamodule_of(trainer).source
        with source.engine_free():
            result = evaluate(
                source.collection.prompts.heldout,
                player=source.collection.player,
                config=config.evaluation,
                max_response_tokens=config.rollouts.max_response_tokens,
                progress=self.progress,
            )
        self.latest = result.metrics
        self.logger.log_metrics(result.metrics, step=trainer.global_step)
        self.logger.log_table(result.rows, f"samples/step_{trainer.global_step:06d}.json")
        score, interval = result.metrics["eval/avg_at_k"], interval_of(result.metrics)
        self.progress.note(f"held-out score {describe_score(score, interval, config.evaluation.k)}")
        return result.metrics
