"""Tables of values and advantages by token position, and pages of tokens, as artifacts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.datamodule import datamodule_of
from vapo.distributed import world_size
from vapo.module import VapoModule
from vapo.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.types import Phase
from vapo.value_page.contents import PageContents
from vapo.value_page.rendering import render_page
from vapo.value_page.token_text import TokenText

_NOTE = "mlflow.note.content"


class PositionDiagnostics(Callback):
    """Writes `diagnostics/positions_iteration_0001.json`.

    At the first and last iteration of each phase and, in both, at every
    `evaluation.every_n_iterations`-th. The numbers are of the iteration's rollouts: from before
    its update. Must come after `ValuePretraining`, which ends the phase.
    """

    def __init__(self, logger: RunLogger) -> None:
        self.logger = logger

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        datamodule = datamodule_of(trainer)
        every_n = pl_module.config.evaluation.every_n_iterations
        if not datamodule.positions or not is_due(pl_module, every_n):
            return
        iteration = int(pl_module.iteration) + 1
        table = {
            "iteration": iteration,
            "phase": pl_module.trained_phase.value,
            "policy_steps": pl_module.policy_steps_before,
            "columns": datamodule.positions,
        }
        self.logger.log_text(
            json.dumps(table), f"diagnostics/positions_iteration_{iteration:04d}.json"
        )


class ValuePages(Callback):
    """Writes `value_pages/iteration_0001.html`, and links it from the run.

    When `value_pages` says so. What it shows is from before the iteration's update. Must come
    after `ValuePretraining`, which ends the phase, and before `Recording`, which adds up times.
    """

    def __init__(
        self, logger: RunLogger, tokenizer: PreTrainedTokenizerBase, progress: Progress
    ) -> None:
        self.logger = logger
        self.token_text = TokenText(tokenizer)
        self.progress = progress
        self._linked = logger.is_resumed

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        datamodule = datamodule_of(trainer)
        contents, datamodule.page = datamodule.page, None
        every_n = pl_module.config.value_pages.every_n_iterations
        if contents is None or every_n is None or not is_due(pl_module, every_n):
            return
        if not trainer.is_global_zero:
            return
        name = f"value_pages/iteration_{int(pl_module.iteration) + 1:04d}.html"
        with self.progress.stage("value_page"):
            page = render_page(contents, self.token_text, self.about(pl_module, contents))
        self.logger.log_text(page, name)
        self.logger.set_tags({"value_page": name})
        self.link()

    def about(self, module: VapoModule, contents: PageContents) -> dict[str, Any]:
        """What the page says of the run."""
        config, hp = module.config, module.hyperparameters
        iteration, phase = int(module.iteration) + 1, module.trained_phase
        facts = {
            "run": self.logger.run_id or "",
            "phase": phase.value.replace("_", " "),
            "policy updates so far": f"{int(module.policy_iterations)} iterations",
            "responses": f"{contents.num_responses}, {contents.accuracy:.0%} correct",
            "actor": config.actor.path,
            "gamma": f"{hp.gamma:g}",
        }
        if module.has_critic:
            critic = "as the policy's" if hp.lambda_critic is None else f"{hp.lambda_critic:g}"
            alpha = f"1 - 1 / ({hp.alpha or 0:g} length)"
            facts["lambda of the policy"] = f"{hp.lambda_policy:g}" if hp.alpha is None else alpha
            facts["lambda of the critic"] = critic
        name = config.tracking.run_name or f"vapo-seed{config.seed}"
        return {
            "title": f"{name}, iteration {iteration}",
            "facts": facts,
            "notes": list(notes(config, phase)),
        }

    def link(self) -> None:
        """Once in a run, so that a description that someone edits meanwhile stays."""
        if self._linked or self.logger.run_id is None:
            return
        place = f"#/experiments/{self.logger.experiment_id}/runs/{self.logger.run_id}"
        line = f"[What the value model believes, token by token]({place}/artifacts/value_pages)"
        given = (self.logger.tags or {}).get(_NOTE)
        self.logger.set_tags({_NOTE: f"{given}\n\n{line}" if given else line})
        self._linked = True


def notes(config: FitConfig, phase: Phase) -> Iterator[str]:
    """What the page lacks, and why."""
    if not config.algorithm.has_critic:
        yield (
            f"No critic (algorithm.advantage_estimator: {config.algorithm.advantage_estimator}): "
            "no values, value errors, TD errors or calibration."
        )
    if phase is Phase.VALUE_PRETRAINING:
        yield (
            "Value pretraining: the policy is fixed, so there are no advantages, and log-probs "
            "are the engine's."
        )
    elif config.algorithm.whiten_advantages:
        yield "Advantages are whitened over the batch; the token's details have them before, too."
    if world_size() > 1:
        yield "The groups are of the first process; the charts are of the rollouts of all."


def is_due(module: VapoModule, every_n: int) -> bool:
    """First and last iteration of each phase, and every n-th.

    `policy_iterations` and `iteration` do not count this iteration yet.
    """
    if in_policy_phase(module):
        finished = int(module.policy_iterations) + 1
        is_last = finished >= module.config.training.num_iterations
    else:
        finished = int(module.iteration) + 1
        is_last = module.phase is Phase.POLICY_OPTIMIZATION
    return finished == 1 or is_last or finished % every_n == 0


def in_policy_phase(module: VapoModule) -> bool:
    return module.trained_phase is Phase.POLICY_OPTIMIZATION
