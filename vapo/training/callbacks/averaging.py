"""Averages the last policies' weights, scores the policy with the mean, and exports it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from vapo.evaluation import evaluate
from vapo.networks.export import save_network
from vapo.networks.lora import changing_names, with_weights
from vapo.runs.checkpoint_saving import AFTER_A_SAVE, run_on_all_ranks
from vapo.runs.run_dirs import RunDir
from vapo.runs.summary import describe_score, interval_of
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.training.callbacks.prompt_scores import PromptScores
from vapo.training.datamodule import actor_weights, datamodule_of, iteration_of
from vapo.training.module import VapoModule
from vapo.types import Phase

AVERAGE_FOLDER = "averaged_policy"
_KEYS = ("avg_at_k", "avg_at_k_ci_low", "avg_at_k_ci_high")


@dataclass
class RunningMean:
    """The sum of the weights of several policies, in float32 on the host; `mean` divides it.

    `first` is the iteration of the first policy in the sum, and `count` the number of policies.
    """

    first: int = 0
    count: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, weights: Iterable[tuple[str, Tensor]], *, first: int) -> None:
        """Add a policy's weights to the sum. A new `first` resets the sum before."""
        if first != self.first:
            self.first, self.count, self.sums = first, 0, {}
        self.count += 1
        for name, tensor in weights:
            cpu_copy = tensor.detach().to("cpu", torch.float32)
            self.sums[name] = self.sums[name] + cpu_copy if name in self.sums else cpu_copy.clone()

    def mean(self) -> dict[str, Tensor]:
        return {name: total / self.count for name, total in self.sums.items()}


@dataclass(eq=False)
class WeightAverage(Callback):
    """Adds up the weights of the last policies, and after the last iteration evaluates their mean.

    It must come after `WeightSync` and `Evaluation`, and before the checkpoint. Afterwards actor
    and engine have the last policy's weights again. It is for runs in one process.
    """

    run_dir: RunDir
    logger: RunLogger
    progress: Progress
    scores: PromptScores
    running: RunningMean = field(default_factory=RunningMean, init=False)
    latest: dict[str, float] = field(default_factory=dict, init=False)

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self.running), "latest": self.latest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.latest = state_dict["latest"]
        names = ("first", "count", "sums")
        self.running = RunningMean(**{name: state_dict[name] for name in names})

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        start, config = iteration_of(trainer).start, pl_module.config
        num_policies, last = config.evaluation.average_policies, config.training.num_iterations
        finished = start.policy_iterations + 1
        if num_policies is None or start.phase is not Phase.POLICY_OPTIMIZATION:
            return
        first = max(1, last - num_policies + 1)
        if finished < first:
            return
        names = changing_names(pl_module.actor.model)
        weights = ((name, x) for name, x in actor_weights(pl_module) if name in names)
        self.running.add(weights, first=first)
        if finished == last:
            self.evaluate(trainer, pl_module, last)
            self.running = RunningMean()

    def evaluate(self, trainer: L.Trainer, module: VapoModule, policy_iterations: int) -> None:
        """Evaluate the policy with the mean weights, log its score, and export it if configured."""
        config, source = module.config, datamodule_of(trainer).source
        with source.engine_free(), self.averaged(trainer, module):
            result = evaluate(
                source.collection.prompts.heldout,
                player=source.collection.player,
                config=config.evaluation,
                max_response_tokens=config.rollouts.max_response_tokens,
                progress=self.progress,
            )
            if config.evaluation.export_average:
                self.export(module)
        steps = int(module.policy_steps)
        self.scores.evaluated("average", result, policy_iterations, steps)
        count = self.running.count
        metrics = {f"average_policy/{key}": result.metrics[f"eval/{key}"] for key in _KEYS}
        self.latest = {**metrics, "average_policy/num_policies": float(count)}
        self.logger.log_metrics(self.latest, step=trainer.global_step)
        score, interval = result.metrics["eval/avg_at_k"], interval_of(result.metrics)
        score_text = describe_score(score, interval, config.evaluation.k)
        self.progress.note(f"the mean of the last {count} policies' weights: {score_text}")

    @contextmanager
    def averaged(self, trainer: L.Trainer, module: VapoModule) -> Iterator[None]:
        """Give actor and engine the mean weights in the block, and then their previous ones."""
        sampler = datamodule_of(trainer).source.collection.player.sampler
        try:
            with with_weights(module.actor.model, self.running.mean()):
                sampler.sync(actor_weights(module))
                yield
        finally:
            sampler.sync(actor_weights(module))

    def export(self, module: VapoModule) -> None:
        """Write the actor to the run's folder of the averaged policy.

        Raises: InterruptedRunError: it cannot be written.
        """
        folder = self.run_dir.path / AVERAGE_FOLDER
        write = partial(self._write, module, folder)
        run_on_all_ranks(write, f"cannot write the averaged policy {folder}", after=AFTER_A_SAVE)
        self.progress.note(f"the policy with the mean weights: {folder}")

    def _write(self, module: VapoModule, folder: Path) -> None:
        config = module.config
        save_network(module.actor, config.actor.path, folder, lora=config.actor.lora)
