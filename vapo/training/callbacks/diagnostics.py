"""Tables of values and advantages by token position, and pages of tokens, as artifacts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig, resolve
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
from vapo.system.distributed import all_ranks
from vapo.system.progress import Progress
from vapo.tracking.links import run_page
from vapo.tracking.logger import RunLogger
from vapo.tracking.records import NOTE_TAG
from vapo.training.datamodule import iteration_of
from vapo.training.iteration import Iteration
from vapo.training.module import VapoModule
from vapo.training.observers import ValueTruths
from vapo.training.schedule import is_due, page_is_due


class DiagnosticTables(Callback):
    """Writes `diagnostics/positions_iteration_0001.json` and `value_truth/iteration_0001.json`.

    By position at the first and last iteration of each phase and, in both, at every
    `evaluation.every_n_iterations`-th; the truth where an iteration has measured it. The numbers
    are of the iteration's rollouts: from before its update. Must come after `ValuePretraining`,
    which ends the phase.
    """

    def __init__(self, logger: RunLogger, truths: ValueTruths | None = None) -> None:
        self.logger, self.truths = logger, truths

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        config, iteration = pl_module.config, iteration_of(trainer)
        every_n = config.evaluation.every_n_iterations
        ends_phase = has_ended_phase(pl_module, iteration)
        if is_due(config, iteration.start, every_n, ends_phase=ends_phase) and (
            columns := positions(iteration, config)
        ):
            self.write("diagnostics/positions_iteration", iteration, {"columns": columns})
        if self.truths is not None and self.truths.latest is not None:
            self.write("value_truth/iteration", iteration, truth_table(self.truths.latest))

    def write(self, name: str, iteration: Iteration, table: Mapping[str, Any]) -> None:
        about = {
            "iteration": iteration.number,
            "phase": iteration.phase.value,
            "policy_steps": iteration.start.policy_steps,
        }
        self.logger.log_text(json.dumps(about | dict(table)), f"{name}_{iteration.number:04d}.json")


class ValuePages(Callback):
    """Writes `value_pages/iteration_0001.html`, and links it from the run.

    As often as `value_pages` sets. The numbers are from before the iteration's update. Must come
    after `ValuePretraining`, which ends the phase, and before `Recording`, which adds up times.
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
        self._linked = logger.is_resumed

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        config, iteration = pl_module.config, iteration_of(trainer)
        ends_phase = has_ended_phase(pl_module, iteration)
        if not page_is_due(config, iteration.start, ends_phase=ends_phase):
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
        self.link()

    def about(
        self, config: FitConfig, iteration: Iteration, contents: PageContents
    ) -> dict[str, Any]:
        """The facts about the run that the page shows."""
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
        """Link the page from the run, only once, so that a user's edit of the description stays."""
        if self._linked or self.logger.run_id is None:
            return
        experiment_id, run_id = str(self.logger.experiment_id), self.logger.run_id
        place = run_page("", experiment_id, run_id, "artifacts/value_pages")
        line = f"[What the value model believes, token by token]({place})"
        given = self.logger.tags.get(NOTE_TAG)
        self.logger.set_tags({NOTE_TAG: f"{given}\n\n{line}" if given else line})
        self._linked = True


def has_ended_phase(module: VapoModule, iteration: Iteration) -> bool:
    """Whether the next iteration is of another phase, because `ValuePretraining` has ended."""
    return module.phase is not iteration.phase


def positions(iteration: Iteration, config: FitConfig) -> Profile:
    """The table of values and advantages by token position. Every rank must call this."""
    most = config.rollouts.max_response_tokens
    return position_profile(iteration.batch, resolve(config), max_response_tokens=most)


def page_of(
    iteration: Iteration, config: FitConfig, truth: ValueTruth | None
) -> PageContents | None:
    """The value page; None where nothing could be trained on. Every rank must call this."""
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
