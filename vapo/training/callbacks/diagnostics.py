"""Callbacks that describe a run between its updates: the held-out score, tables of values and
advantages by token position, and value pages."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig, resolve
from vapo.config.hyperparameters import evaluated_iterations
from vapo.config.sources import default_name
from vapo.diagnostics.position_profiles import Profile, position_profile
from vapo.diagnostics.value_page.contents import (
    PageContents,
    estimator_facts,
    notes,
    page_contents,
    responses_fact,
)
from vapo.diagnostics.value_page.rendering import render_page
from vapo.diagnostics.value_page.token_text import TokenText
from vapo.diagnostics.value_truth.measure import ValueTruth, truth_table
from vapo.evaluation import evaluate
from vapo.runs.summary import describe_score, interval_of
from vapo.system.distributed import all_ranks
from vapo.system.progress import Progress
from vapo.tracking.links import run_page
from vapo.tracking.logger import RunLogger
from vapo.tracking.records import NOTE_TAG
from vapo.tracking.shared_view import SCORE, SCORE_BEFORE
from vapo.training.callbacks.prompt_scores import PromptScores
from vapo.training.datamodule import datamodule_of, iteration_of
from vapo.training.iteration import Iteration, is_due
from vapo.training.module import VapoModule
from vapo.training.observers import ValueTruths
from vapo.types import Phase


@dataclass(eq=False)
class Evaluation(Callback):
    """Evaluates the policy on the held-out prompts, before training and after the iterations that
    the config chooses.

    Attributes:
        scores: records the scores of single prompts; None: they are not recorded.
        first, latest: the metrics of the first and of the latest evaluation.
        policy_steps: the number of the actor's updates at the latest evaluation. `score_of` needs
            it to choose `best.ckpt`.
    """

    logger: RunLogger
    progress: Progress
    scores: PromptScores | None = None
    first: dict[str, float] = field(default_factory=dict, init=False)
    latest: dict[str, float] = field(default_factory=dict, init=False)
    policy_steps: int = field(default=-1, init=False)

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "latest": self.latest, "policy_steps": self.policy_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first, self.latest = state_dict["first"], state_dict["latest"]
        self.policy_steps = state_dict.get("policy_steps", -1)  # earlier versions have none

    def score_of(self, module: VapoModule) -> float:
        """Return the latest held-out score, or -inf if the policy has been updated since."""
        is_current = int(module.policy_steps) == self.policy_steps
        return self.latest[SCORE] if is_current else -math.inf

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        if not self.first:
            self.first = self.run(trainer, pl_module, int(pl_module.policy_iterations))
            start = {SCORE_BEFORE: self.first[SCORE]}  # which a run list shows beside the last one
            self.logger.log_metrics(start, step=self.logger.policy_begins_at)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        start = iteration_of(trainer).start
        if start.phase is Phase.POLICY_OPTIMIZATION:
            finished, config = start.policy_iterations + 1, pl_module.config
            if finished in evaluated_iterations(config):
                self.run(trainer, pl_module, finished)
        # for callbacks of the user's own, as Lightning's EarlyStopping
        pl_module.log(SCORE, self.latest[SCORE], logger=False, sync_dist=True)

    def run(
        self, trainer: L.Trainer, pl_module: VapoModule, policy_iterations: int
    ) -> dict[str, float]:
        """Evaluate the policy, log metrics and a table of sample responses; return the metrics.

        `policy_iterations` is the number of iterations that the policy was trained for.
        """
        config, source = pl_module.config, datamodule_of(trainer).source
        with source.engine_free():
            result = evaluate(
                source.collection.prompts.heldout,
                player=source.collection.player,
                config=config.evaluation,
                max_response_tokens=config.rollouts.max_response_tokens,
                progress=self.progress,
            )
        self.latest, self.policy_steps = result.metrics, int(pl_module.policy_steps)
        if self.scores is not None:
            counts = policy_iterations, self.policy_steps
            self.latest |= self.scores.evaluated("evaluation", result, *counts)
        begins_at = self.logger.policy_begins_at
        step = max(trainer.global_step, begins_at)  # value pretraining does not change the policy
        self.logger.log_metrics(self.latest, step=step)
        self.logger.log_table(result.rows, f"samples/step_{step - begins_at:06d}.json")
        score, interval = result.metrics[SCORE], interval_of(result.metrics)
        self.progress.note(f"held-out score {describe_score(score, interval, config.evaluation.k)}")
        return self.latest


@dataclass(eq=False)
class DiagnosticTables(Callback):
    """Writes `diagnostics/positions_iteration_0001.json` and `value_truth/iteration_0001.json`.

    The table of values and advantages by token position is written after the first and the last
    iteration of each phase, and after every `evaluation.every_n_iterations`-th. The table of true
    values is written after each iteration that has measured some. All numbers are from before the
    iteration's update. It must come after `ValuePretraining`, which ends the phase.
    """

    logger: RunLogger
    truths: ValueTruths | None = None

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        config, iteration = pl_module.config, iteration_of(trainer)
        every_n = config.evaluation.every_n_iterations
        if due(pl_module, iteration, every_n) and (columns := positions(iteration, config)):
            self.write("diagnostics/positions_iteration", iteration, {"columns": columns})
        if self.truths is not None and self.truths.latest is not None:
            self.write("value_truth/iteration", iteration, truth_table(self.truths.latest))

    def write(self, name: str, iteration: Iteration, table: Mapping[str, Any]) -> None:
        """Log a table, with the iteration's number, as the JSON artifact `{name}_{number}.json`."""
        about = {
            "iteration": iteration.number,
            "phase": iteration.phase.value,
            "policy_steps": iteration.start.policy_steps,
        }
        self.logger.log_text(json.dumps(about | dict(table)), f"{name}_{iteration.number:04d}.json")


class ValuePages(Callback):
    """Writes `value_pages/iteration_0001.html` in the iterations that `value_pages` chooses, and
    links the pages from the run's description.

    The numbers are from before the iteration's update. It must come after `ValuePretraining`, which
    ends the phase, and before `Recording`, which adds up times. `latest` is the name of the last
    page that this process wrote, and empty before the first.
    """

    def __init__(
        self,
        logger: RunLogger,
        tokenizer: PreTrainedTokenizerBase,
        progress: Progress,
        truths: ValueTruths | None = None,
    ) -> None:
        self.logger = logger
        self.token_text = TokenText(tokenizer)
        self.progress = progress
        self.truths = truths
        self.latest = ""
        self._linked = logger.is_resumed

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        config, iteration = pl_module.config, iteration_of(trainer)
        if not due(pl_module, iteration, config.value_pages.every_n_iterations):
            return
        with self.progress.stage("value_page"):
            truth = None if self.truths is None else self.truths.latest
            contents = page_of(iteration, config, truth)
            if contents is None or not trainer.is_global_zero:
                return
            page = render_page(contents, self.token_text, self.about(config, iteration, contents))
        name = f"value_pages/iteration_{iteration.number:04d}.html"
        self.logger.log_text(page, name)
        self.logger.set_tags({"value_page": name})
        self.latest = name
        self.link()

    def about(
        self, config: FitConfig, iteration: Iteration, contents: PageContents
    ) -> dict[str, Any]:
        """Return the title, the facts and the notes that the page shows."""
        phase = iteration.phase
        facts = {
            "run": self.logger.run_id or "",
            "phase": phase.value.replace("_", " "),
            "policy updates so far": f"{iteration.start.policy_iterations} iterations",
            "responses": responses_fact(contents),
            "actor": config.actor.path,
            **estimator_facts(config),
        }
        name = config.tracking.run_name or default_name(config)
        return {
            "title": f"{name}, iteration {iteration.number}",
            "facts": facts,
            "notes": list(notes(config, phase)),
        }

    def link(self) -> None:
        """Link the pages in the run's description, only once, so that a user's edit stays."""
        if self._linked or self.logger.run_id is None:
            return
        experiment_id, run_id = str(self.logger.experiment_id), self.logger.run_id
        place = run_page("", experiment_id, run_id, "artifacts/value_pages")
        line = f"[What the value model believes, token by token]({place})"
        user_note = self.logger.tags.get(NOTE_TAG)
        self.logger.set_tags({NOTE_TAG: f"{user_note}\n\n{line}" if user_note else line})
        self._linked = True


def due(module: VapoModule, iteration: Iteration, every_n: int | None) -> bool:
    """Whether what comes every `every_n` iterations is due after this one (see `is_due`).

    This is called once the module has the next iteration's phase.
    """
    ends_phase = module.phase is not iteration.phase
    return is_due(module.config, iteration.start, every_n, ends_phase=ends_phase)


def positions(iteration: Iteration, config: FitConfig) -> Profile:
    """Return the table of values and advantages by token position. Every rank must call this."""
    max_tokens = config.rollouts.max_response_tokens
    return position_profile(iteration.batch, resolve(config), max_response_tokens=max_tokens)


def page_of(
    iteration: Iteration, config: FitConfig, truth: ValueTruth | None
) -> PageContents | None:
    """Return the value page's contents, or None if no row can be shown. Every rank must call this.

    Rows are shown if their whole group could be trained on.
    """
    batch = iteration.checked.whole_groups(iteration.batch)
    if iteration.checked.fault is not None or not all_ranks(len(batch) > 0):
        return None
    return page_contents(
        batch,
        config,
        positions(iteration, config),
        iteration.start.index,
        truth=None if truth is None else truth.on_rows(iteration.checked.whole_rows),
    )
