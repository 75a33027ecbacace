"""A callback that scores a run's last policies on all held-out prompts, and keeps metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from vapo.evaluation import evaluate
from vapo.system.progress import Progress
from vapo.training.datamodule import datamodule_of, iteration_of
from vapo.training.module import VapoModule


@dataclass(eq=False)
class Scoring(Callback):
    """Scores the policies after some iterations; `found` is what the driver writes down.

    `windows`: a prefix of names, and the policy iterations whose policies are scored, each with one
    response to every held-out prompt. `found`: of each window `score`, the mean over its policies,
    and `right`, of each held-out prompt how many of them were right; and a list for each of
    `metrics`, with a number for each policy iteration, from before its update.
    """

    windows: Mapping[str, Collection[int]]
    metrics: Collection[str]
    result: dict[str, Any] = field(default_factory=dict, init=False)
    _right: dict[str, list[list[bool]]] = field(default_factory=dict, init=False)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        iteration = iteration_of(trainer)
        for name in self.metrics:
            if name in iteration.metrics:
                numbers = self.result.setdefault(name, [])
                numbers.append(round(float(iteration.metrics[name]), 4))
        finished = iteration.start.policy_iterations + 1
        for prefix in (name for name, numbers in self.windows.items() if finished in numbers):
            right = self._right.setdefault(prefix, [])
            right.append(self.judge(trainer, pl_module))
            by_prompt = [sum(column) for column in zip(*right, strict=True)]
            self.result[f"{prefix}score"] = sum(by_prompt) / len(by_prompt) / len(right)
            self.result[f"{prefix}scores"] = [round(sum(row) / len(row), 4) for row in right]
            self.result[f"{prefix}right"] = "".join(map(str, by_prompt))

    def judge(self, trainer: L.Trainer, module: VapoModule) -> list[bool]:
        """Whether the present policy's response to each held-out prompt is right."""
        config, source = module.config, datamodule_of(trainer).source
        with source.engine_free():
            result = evaluate(
                source.collection.prompts.heldout,
                player=source.collection.player,
                config=replace(config.evaluation, num_prompts=None, k=1),
                max_response_tokens=config.rollouts.max_response_tokens,
                progress=Progress(enabled=False),
            )
        return [bool(rollout.is_correct) for rollout in result.rollouts]
