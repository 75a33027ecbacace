"""Record a sweep in MLflow: its parent run, and the names and tags of the runs below it."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from vapo.config import FitConfig
from vapo.config.written import is_from_environment
from vapo.files.whole_files import write_text
from vapo.runs.run_dirs import read_record
from vapo.sweep.folders import SWEEP_RECORD, Outcome
from vapo.sweep.identity import code_version
from vapo.sweep.plan import Plan, Task, describe_plan, differences
from vapo.sweep.report.tables import markdown_text
from vapo.tracking.delivery import one_line
from vapo.tracking.links import DESCRIPTION, curves_page, how_to_open
from vapo.tracking.opening import open_store
from vapo.tracking.provenance import provenance_tags
from vapo.tracking.records import NOTE_TAG, SCORE_START, with_score
from vapo.tracking.sink import active_run
from vapo.tracking.stores import locate_store

_MAX_PARAM = 6000  # characters
_MAX_NOTE = 5000  # MLflow limits a tag, and the report's table is put above this text


class ParentRun:
    """The MLflow run that stands for a sweep. All sweeps that start in one folder share it.

    Its artifact `sweep.json`, which a report reads, lists the rows in order and the run of each row
    and seed. If a store fails after the parent run was created, the sweep goes on: `note` gets one
    line, and everything is recorded again when the next run ends.
    """

    def __init__(
        self, plan: Plan, sweep_dir: Path, command: str, note: Callable[[str], None] = print
    ) -> None:
        self.plan = plan
        self.path = sweep_dir / SWEEP_RECORD
        self.note = note
        self.outcomes = {task.identity: Outcome("waiting") for task in plan.tasks}
        self._is_behind = False
        self._metric_keys = metric_keys([row.name for row in plan.grid.rows])
        tracking = plan.base.tracking
        self.store = locate_store(tracking.uri)
        self.experiment_id = open_store(self.store, tracking.experiment, print)
        self.client = self.store.client()
        self.run_id = self._find() or self._create()
        self.client.update_run(self.run_id, "RUNNING")
        self.client.set_tag(self.run_id, NOTE_TAG, describe_plan(plan, command)[:_MAX_NOTE])
        self.client.log_text(self.run_id, self._write(), SWEEP_RECORD)

    def how_to_open(self) -> str:
        """Return the address of the parent run's page, or the command that serves it."""
        uri = self.plan.base.tracking.uri
        return how_to_open(uri, self.experiment_id, self.run_id, DESCRIPTION)

    def curves_page(self) -> str | None:
        """Return the address of a chart with all runs' curves; None without a server or runs."""
        ids = (self.outcomes[identity].mlflow_run_id for identity in self.plan.assigned.values())
        run_ids = dict.fromkeys(run_id for run_id in ids if run_id)
        if not self.store.is_http or not run_ids:
            return None
        return curves_page(self.store.shown_uri, self.experiment_id, [*run_ids])

    def _find(self) -> str | None:
        from mlflow.exceptions import MlflowException

        with contextlib.suppress(OSError, ValueError, KeyError, MlflowException):
            run = active_run(self.client, json.loads(self.path.read_text())["parent_run_id"])
            if run and run.info.experiment_id == self.experiment_id:
                return str(run.info.run_id)
        return None

    def _create(self) -> str:
        grid, sources = self.plan.grid, self.plan.base.sources
        tags = {**provenance_tags(), "role": "sweep", "sweep": grid.name, "code": code_version()}
        run = self.client.create_run(self.experiment_id, tags=tags, run_name=f"sweep {grid.name}")
        params = {
            "_differs": sources.differences(),
            "config": " ".join(sources.files),
            "rows": ", ".join(row.name for row in grid.rows),
        }
        for key, value in params.items():
            self.client.log_param(run.info.run_id, key, value[:_MAX_PARAM])
        return str(run.info.run_id)

    def child_config(self, task: Task, config: FitConfig) -> FitConfig:
        """Return a task's config with the MLflow name and tags of its run."""
        tags = {**config.tracking.tags, **self.child_tags(task)}
        base = self.plan.base
        uri = base.tracking.uri
        if self.store.database is not None and not is_from_environment(base, "tracking.uri"):
            uri = self.store.uri
        tracking = replace(config.tracking, uri=uri, run_name=task.name, tags=tags)
        sources = config.from_environment.taking("tracking.uri", base.from_environment)
        return replace(config, tracking=tracking, from_environment=sources)

    def child_tags(self, task: Task) -> dict[str, str]:
        row, grid = task.row, self.plan.grid
        tags = {
            "mlflow.parentRunId": self.run_id,
            "sweep": grid.name,
            "role": "value_pretraining" if task.is_pretraining else "row",
            "system": row.system,
            "seed": str(task.seed),
            "identity": task.identity,
        }
        if task.is_pretraining:
            shared = self.plan.shares(task.seed).get(task.identity, [row.name])
            return {**tags, NOTE_TAG: f"Value pretraining for: {markdown_text(', '.join(shared))}"}
        differs = [*map(str, differences(self.plan.row_configs[row.name], self.plan.base))]
        listed = "\n".join(f"- {line}" for line in differs or ["the base config"])
        tags |= {
            "row": row.name,
            "component_off": row.component_off or "none",
            "differs": "; ".join(differs) or "nothing: the base config",
            NOTE_TAG: f"**{markdown_text(row.name)}**, seed {task.seed}\n\n{listed}",
        }
        if row.paper_score is not None:
            tags["paper_score"] = f"{row.paper_score:g}"
        if row.name == grid.full_system:
            tags["full_system"] = "true"
        return tags

    def record_end(self, task: Task, outcome: Outcome) -> None:
        """Note how a task ended, and record the sweep's present state.

        A run that had finished in an earlier sweep gets the tags of this one, unless it was deleted
        from the store.

        Raises: OSError: `sweep.json` cannot be written in the sweep's folder.
        """
        from mlflow.exceptions import MlflowException

        self.outcomes[task.identity] = outcome
        self._record()
        if outcome.was_done and (run_id := outcome.mlflow_run_id):
            tags = self.child_tags(task)
            with contextlib.suppress(MlflowException):  # the run was deleted; the report says so
                old_note = self.client.get_run(run_id).data.tags.get(NOTE_TAG, "")
                if old_note.startswith(SCORE_START):
                    tags[NOTE_TAG] = with_score(tags[NOTE_TAG], old_note.partition("\n\n")[0])
                for key, value in tags.items():
                    self.client.set_tag(run_id, key, value)

    def _log_scores(self) -> None:
        """Log each row's mean score over its finished seeds, and the best of these means.

        Nothing is logged before the first score.

        The step of these metrics is the number of runs that have ended.
        """
        from mlflow.entities import Metric, RunTag

        scores_by_row = defaultdict(list)
        for (row, _), identity in self.plan.assigned.items():
            if (score := self.outcomes[identity].score) is not None:
                scores_by_row[row].append(score)
        if not scores_by_row:
            return
        scores = {row: fmean(values) for row, values in scores_by_row.items()}
        best = max(scores, key=scores.__getitem__)
        values = {"sweep/best_score": scores[best]} | {
            self._metric_keys[row]: scores[row] for row in scores
        }
        step = sum(outcome.state != "waiting" for outcome in self.outcomes.values())
        now_ms = int(time.time() * 1000)
        metrics = [Metric(key, score, now_ms, step) for key, score in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics, tags=[RunTag("best_row", best)])

    def abandoned(self, attempt: Path) -> None:
        """Mark a run as abandoned: it was killed before a checkpoint, and is started anew.

        A run that was not recorded in the store, or cannot be reached there, is ignored.

        Args:
            attempt: the run's folder.
        """
        from mlflow.exceptions import MlflowException

        if run_id := read_record(attempt).get("mlflow_run_id"):
            with contextlib.suppress(OSError, MlflowException):
                self.client.set_terminated(run_id, "KILLED")
                self.client.set_tag(run_id, "role", "abandoned")

    def _write(self) -> str:
        """Write `sweep.json` in the sweep's folder, and return its text."""
        text = json.dumps(self.contents(), indent=2)
        write_text(self.path, text + "\n")
        return text

    def _record(self) -> None:
        text = self._write()
        with self._store_may_fail():
            self.client.log_text(self.run_id, text, SWEEP_RECORD)
            self._log_scores()
            self._is_behind = False

    @contextlib.contextmanager
    def _store_may_fail(self) -> Iterator[None]:
        """Ignore MLflow's errors in this block, but note the first one to the user.

        Later ones are silent until everything has been recorded.
        """
        from mlflow.exceptions import MlflowException
        from requests import RequestException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (MlflowException, SQLAlchemyError, RequestException) as error:
            if not self._is_behind:
                reason = one_line(self.store.redact(str(error)))
                self.note(
                    f"note: tracking: the sweep's parent run {self.run_id} cannot be recorded in "
                    f"{self.store.shown_uri}: {reason}; the sweep continues, {self.path} has all "
                    "its runs, and the next one that ends tries again"
                )
            self._is_behind = True

    def contents(self) -> dict[str, Any]:
        grid, tasks = self.plan.grid, {task.identity: task for task in self.plan.tasks}

        def entry(identity: str) -> dict[str, Any]:
            fields = ("state", "mlflow_run_id", "run_dir")
            outcome = {key: getattr(self.outcomes[identity], key) for key in fields}
            return {"identity": identity, **outcome}

        row_fields = ("system", "component_off", "paper_score")
        return {
            "parent_run_id": self.run_id,
            "grid": grid.name,
            "full_system": grid.full_system,
            "rows": [
                {"row": row.name, **{key: getattr(row, key) for key in row_fields}}
                for row in grid.rows
            ],
            "runs": [
                {"row": row, "seed": seed, **entry(identity), "needs": tasks[identity].needs}
                for (row, seed), identity in self.plan.assigned.items()
            ],
            "value_pretrainings": [
                entry(identity) for identity in tasks if tasks[identity].is_pretraining
            ],
        }

    def close(self, status: str) -> None:
        """End the parent run. First try once more to record what the store has missed."""
        if self._is_behind:
            self._record()
        with self._store_may_fail():
            self.client.set_terminated(self.run_id, status)


def metric_keys(rows: Sequence[str]) -> dict[str, str]:
    """Return row -> the name of the metric with its score: `sweep/` and the row's name.

    Every character but letters, digits, `_`, `.`, `:`, space and `-` becomes `_`, and so does a
    name that is empty or only dots. If two rows would share a metric name, or the name would be
    `sweep/best_score`, the row's number in the grid follows: `sweep/a_b/2`.
    """
    safe = [re.sub(r"[^\w. :-]|^\.*$", "_", row) for row in rows]  # dots alone are not a name
    return {
        row: f"sweep/{name}" + f"/{i}" * ([*safe, "best_score"].count(name) > 1)
        for i, (row, name) in enumerate(zip(rows, safe, strict=True), start=1)
    }
