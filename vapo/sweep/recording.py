"""A sweep in MLflow: the parent run, and the names and tags of its children."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vapo.config import FitConfig
from vapo.config.written import is_from_environment
from vapo.sweep.describe import describe_differences, describe_plan
from vapo.sweep.folders import Outcome
from vapo.sweep.identity import code_version
from vapo.sweep.plan import Plan, Task
from vapo.system.atomic_files import write_text
from vapo.tracking.links import how_to_open
from vapo.tracking.opening import open_store
from vapo.tracking.provenance import provenance_tags
from vapo.tracking.stores import locate_store

if TYPE_CHECKING:
    from mlflow import MlflowClient

RECORD = "sweep.json"
_MAX_PARAM = 6000
_MAX_NOTE = 5000  # MLflow bounds a tag; the table of the report goes below


class Parent:
    """The parent run of a sweep folder: the same one for every start in this folder.

    Its artifact `sweep.json` lists the rows in order and the run of each (row, seed); a report
    reads it.
    """

    def __init__(self, plan: Plan, sweep_dir: Path, command: str) -> None:
        tracking = plan.base.tracking
        self.plan = plan
        self.path = sweep_dir / RECORD
        self.store = locate_store(tracking.uri)
        experiment_id = open_store(self.store, tracking.experiment, print)
        self.experiment_id = experiment_id
        from mlflow import MlflowClient

        self.client: MlflowClient = MlflowClient(self.store.client_uri)
        self.run_id = self._find(experiment_id) or self._create(experiment_id)
        self.client.update_run(self.run_id, "RUNNING")
        description = describe_plan(plan, command)
        if len(description) > _MAX_NOTE:
            description = f"{description[: _MAX_NOTE - 4]}\n..."
        self.client.set_tag(self.run_id, "mlflow.note.content", description)
        self.outcomes: dict[str, Outcome] = {}
        self.record()

    def how_to_open(self) -> str:
        """The address of its charts on a server, or the command that serves it."""
        return how_to_open(self.plan.base.tracking.uri, self.experiment_id, self.run_id)

    def _find(self, experiment_id: str) -> str | None:
        from mlflow.exceptions import MlflowException

        with contextlib.suppress(OSError, ValueError, KeyError, MlflowException):
            run = self.client.get_run(json.loads(self.path.read_text())["parent_run_id"])
            if run.info.experiment_id == experiment_id and run.info.lifecycle_stage == "active":
                return str(run.info.run_id)
        return None

    def _create(self, experiment_id: str) -> str:
        name = self.plan.grid.name
        tags = {**provenance_tags(), "role": "sweep", "sweep": name, "code": code_version()}
        run = self.client.create_run(experiment_id, tags=tags, run_name=f"sweep {name}")
        run_id, plan = str(run.info.run_id), self.plan
        self.client.log_param(run_id, "_differs", plan.base.sources.differences()[:_MAX_PARAM])
        self.client.log_param(run_id, "config", " ".join(plan.base.sources.files)[:_MAX_PARAM])
        rows = ", ".join(row.name for row in plan.grid.rows)
        self.client.log_param(run_id, "rows", rows[:_MAX_PARAM])
        return run_id

    def child_config(self, task: Task, config: FitConfig) -> FitConfig:
        """The task's config with the MLflow name and tags of its run."""
        tags = {**config.tracking.tags, **self.child_tags(task)}
        base = self.plan.base
        uri = base.tracking.uri
        if self.store.database is not None and not is_from_environment(base, "tracking.uri"):
            uri = self.store.uri
        tracking = replace(config.tracking, uri=uri, run_name=task.name, tags=tags)
        known = config.from_environment.taking("tracking.uri", base.from_environment)
        return replace(config, tracking=tracking, from_environment=known)

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
            return {**tags, "mlflow.note.content": f"Value pretraining for: {', '.join(shared)}"}
        differs = describe_differences(self.plan.row_configs[row.name], self.plan.base)
        tags |= {
            "row": row.name,
            "component_off": row.component_off or "none",
            "differs": "; ".join(differs) or "nothing: the base config",
            "mlflow.note.content": f"**{row.name}**, seed {task.seed}\n\n"
            + "\n".join(f"- {line}" for line in differs or ["the base config"]),
        }
        if row.paper_score is not None:
            tags["paper_score"] = f"{row.paper_score:g}"
        if row.name == grid.full_system:
            tags["full_system"] = "true"
        return tags

    def ended(self, task: Task, outcome: Outcome) -> None:
        self.outcomes[task.identity] = outcome
        self.record()
        self._log_scores()
        if outcome.was_done and outcome.mlflow_run_id:
            from mlflow.exceptions import MlflowException

            with contextlib.suppress(MlflowException):  # gone from the store: the report says so
                for key, value in self.child_tags(task).items():
                    self.client.set_tag(outcome.mlflow_run_id, key, value)

    def scores(self) -> dict[str, float]:
        """Of each row the mean over its seeds that have finished."""
        found: dict[str, list[float]] = {}
        for (row, _), identity in self.plan.assigned.items():
            score = self.outcomes.get(identity, Outcome("waiting")).score
            if score is not None:
                found.setdefault(row, []).append(score)
        return {row: fmean(values) for row, values in found.items()}

    def _log_scores(self) -> None:
        """The table as metrics, at the number of runs that have ended."""
        from mlflow.entities import Metric, RunTag

        scores = self.scores()
        if not scores:
            return
        best = max(scores, key=lambda row: scores[row])
        values = {"best_score": scores[best], **scores}
        now_ms, step = int(time.time() * 1000), len(self.outcomes)
        self.client.log_batch(
            self.run_id,
            metrics=[
                Metric("sweep/" + re.sub(r"[^\w. :-]", "_", name), score, now_ms, step)
                for name, score in values.items()
            ],
            tags=[RunTag("best_row", best)],
        )

    def abandoned(self, attempt: Path) -> None:
        """Mark a run that was killed before its first checkpoint: another one replaces it."""
        from mlflow.exceptions import MlflowException

        with contextlib.suppress(OSError, ValueError, KeyError, MlflowException):
            run_id = json.loads((attempt / "run.json").read_text())["mlflow_run_id"]
            self.client.set_terminated(run_id, "KILLED")
            self.client.set_tag(run_id, "role", "abandoned")

    def record(self) -> None:
        text = json.dumps(self.contents(), indent=2)
        write_text(self.path, text + "\n")
        self.client.log_text(self.run_id, text, RECORD)

    def contents(self) -> dict[str, Any]:
        plan, grid = self.plan, self.plan.grid
        tasks: Mapping[str, Task] = {task.identity: task for task in plan.tasks}
        runs = []
        for (row, seed), identity in plan.assigned.items():
            needs = tasks[identity].needs
            runs.append({"row": row, "seed": seed, **self._outcome(identity), "needs": needs})
        first = [self._outcome(task.identity) for task in plan.tasks if task.is_pretraining]
        return {
            "parent_run_id": self.run_id,
            "grid": grid.name,
            "full_system": grid.full_system,
            "rows": [
                {
                    "row": row.name,
                    "system": row.system,
                    "component_off": row.component_off,
                    "paper_score": row.paper_score,
                }
                for row in grid.rows
            ],
            "runs": runs,
            "value_pretrainings": first,
        }

    def _outcome(self, identity: str) -> dict[str, Any]:
        outcome = self.outcomes.get(identity, Outcome("waiting"))
        return {
            "identity": identity,
            "state": outcome.state,
            "mlflow_run_id": outcome.mlflow_run_id,
            "run_dir": outcome.run_dir,
        }

    def close(self, status: str) -> None:
        self.client.set_terminated(self.run_id, status)
