"""Records the scores of single prompts, and logs means over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from vapo.evaluation import EvaluationResult, mean_of_sums
from vapo.rollouts.batch import prompt_scores
from vapo.runs.run_dirs import RunDir
from vapo.system.distributed import gather_objects, rank
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.tracking.prompt_scores import SCORES_NAME, ScoredPrompts, ScoresFile, unique
from vapo.training.datamodule import iteration_of
from vapo.training.module import VapoModule
from vapo.types import Phase, PromptScore


@dataclass(eq=False)
class PromptScores(Callback):
    """Writes the scores of single prompts to `prompt_scores.jsonl`, and logs `fresh/...` metrics.

    A batch is scored before it is trained on, so prompts that no earlier batch had are new to the
    policy. The `fresh/...` metrics, after each iteration of the policy phase, are means over these.
    Must come before `Evaluation`, which hands it each evaluation's result. Only the first process
    has the file.
    """

    run_dir: RunDir
    logger: RunLogger
    progress: Progress
    fresh: dict[str, float] = field(default_factory=dict, init=False)
    _file: ScoresFile | None = field(default=None, init=False)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        if rank() == 0:  # the others learn the run's folder later, and do not need it
            self._file = ScoresFile(self.run_dir.path, self.progress.note)
            self._file.begin(int(pl_module.policy_iterations))
            self.fresh = self._fresh_metrics(self._file)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        iteration = iteration_of(trainer)
        start = iteration.start
        scores = of_all_ranks(iteration.batch.sampled_groups)
        if start.phase is not Phase.POLICY_OPTIMIZATION or not scores or self._file is None:
            return
        history = self._file.history
        scored = history.with_news(start.policy_iterations, start.policy_steps, scores)
        self._file.add("batch", scored)
        self.fresh = self._fresh_metrics(self._file)
        self.logger.log_metrics(self.fresh, step=trainer.global_step)

    def evaluated(
        self, kind: str, result: EvaluationResult, policy_iterations: int, policy_steps: int
    ) -> dict[str, float]:
        """Record an evaluation's scores of single prompts. Every rank must call this.

        Args:
            kind: the kind of record in the file. Only "evaluation" counts toward the returned
                metrics.

        Returns: the means over the latest evaluations as metrics. They are empty on other processes
            than the first.
        """
        k = result.k
        groups = (result.rollouts[i : i + k] for i in range(0, len(result.rollouts), k))
        scores = of_all_ranks(prompt_scores(groups))
        if self._file is None:
            return {}
        self._file.add(kind, ScoredPrompts(policy_iterations, policy_steps, unique(scores)))
        means, num_policies = self._file.history.recent()
        if kind != "evaluation" or not means:
            return {}
        return {
            **named("eval/recent_avg_at_k", means.values()),
            "eval/num_recent_policies": float(num_policies),
        }

    def _fresh_metrics(self, file: ScoresFile) -> dict[str, float]:
        """Return metrics: the mean score in the last batches of prompts that were new there."""
        fresh = file.history.fresh()
        if not fresh.scores:
            return {}
        return {
            **named("fresh/accuracy", fresh.means),
            "fresh/num_prompts": float(len(fresh.scores)),
            "fresh/num_responses": float(fresh.num_responses),
            "fresh/num_batches": float(fresh.num_batches),
        }

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._log_file()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._log_file()

    def _log_file(self) -> None:
        """Log `prompt_scores.jsonl` as an artifact of the run, if there is one."""
        if self._file is not None and (text := self._file.read()):
            self.logger.log_text(text, SCORES_NAME)


def of_all_ranks(scores: Sequence[PromptScore]) -> list[PromptScore]:
    """Return the scores of all ranks. Every rank must call this."""
    return [score for part in gather_objects(tuple(scores)) for score in part]


def named(key: str, means: Iterable[float]) -> dict[str, float]:
    """Return the mean of the prompts' means as the metric `key`, and its confidence interval as
    `key_ci_low` and `key_ci_high`."""
    values = torch.tensor(list(means), dtype=torch.float64)
    sums = torch.stack([values.sum(), values.square().sum(), torch.ones_like(values).sum()])
    mean_and_interval = mean_of_sums(sums)
    return {
        key: mean_and_interval["mean"],
        **{f"{key}_{end}": mean_and_interval[end] for end in ("ci_low", "ci_high")},
    }
