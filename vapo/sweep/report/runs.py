"""Read runs for a report from MLflow: a sweep's, an experiment's, or runs by id."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vapo.errors import UserError
from vapo.sweep.folders import SWEEP_RECORD, pretraining_identity
from vapo.sweep.grid import GridRow
from vapo.sweep.report.rows import (
    CRITIC_INIT,
    RecordedRun,
    identity_facts,
    make_recorded_run,
    prompt_digests,
    separate_rows,
    usable_runs,
)
from vapo.sweep.report.run_records import HISTORIES, RunRecord
from vapo.tracking.metric_names import stored_names
from vapo.tracking.prompt_scores import SCORES_NAME, PromptHistory, history_of
from vapo.tracking.stores import Store

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

_PAGE = 1000


@dataclass(frozen=True)
class Collection:
    """The runs of one report, at most one for each row and seed.

    Attributes:
        full_system: the row with which others are compared; None for no comparison.
        pretrainings: the runs that pretrained critics.
        parent_run_id: the sweep's parent run; None if the report is not on one sweep.
        within: the table uses a run's last evaluation after at most this many policy steps; None
            takes the last evaluation of all.
        notes: sentences on how the rows were separated, and on runs that were left out, failed or
            are missing from the store.

    Raises: UserError: the full system is not one of the rows.
    """

    title: str
    rows: Sequence[GridRow]
    runs: Sequence[RunRecord]
    full_system: str | None = None
    pretrainings: Sequence[RunRecord] = ()
    parent_run_id: str | None = None
    within: int | None = None
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        rows = [row.name for row in self.rows]
        if self.full_system is not None and self.full_system not in rows:
            raise UserError(f"--full_system {self.full_system}: not a row; rows: {', '.join(rows)}")


class Reader:
    """Reads the runs of a report from one MLflow store."""

    def __init__(self, store: Store) -> None:
        self.client = store.client()
        self.store = store

    def sweep(
        self, parent_run_id: str, full_system: str | None = None, *, flag: str = "--sweep"
    ) -> Collection:
        """Read the runs of the sweep with this parent run.

        Args:
            full_system: the row with which others are compared; None takes the sweep's own.
            flag: the option that gave the id, for errors.

        Raises: UserError: the run is missing, or is not the parent of a sweep.
        """
        self._run(parent_run_id, flag)
        try:
            record = json.loads(self._artifact(parent_run_id, SWEEP_RECORD))
        except (LookupError, ValueError):
            raise UserError(
                f"{flag} {parent_run_id}: this run in {self.store.shown_uri} has no sweep.json, "
                "so it is not the parent of a sweep; give the id that `vapo sweep` printed, or use "
                "--runs"
            ) from None
        lost_reason = "finished, but not in the store or without an evaluation"
        runs, pretrainings, missing = [], [], []
        for entry in record["runs"]:
            recorded, state = self._evaluated(entry["mlflow_run_id"]), entry["state"]
            if state == "finished" and recorded is not None:
                runs.append(self._record(recorded, entry["row"], entry["seed"]))
            else:
                reason = lost_reason if state == "finished" else state
                missing.append(f"{entry['row']}/{entry['seed']} ({reason})")
        for entry in record["value_pretrainings"]:
            if (recorded := self._evaluated(entry["mlflow_run_id"])) is not None:
                pretrainings.append(self._record(recorded, recorded.name, recorded.seed))
            elif entry["state"] == "finished":
                missing.append(f"value pretraining {entry['identity']} ({lost_reason})")
        keys = ("row", "system", "component_off", "paper_score")
        return Collection(
            f"Sweep {record['grid']}",
            [GridRow(*(row[key] for key in keys)) for row in record["rows"]],
            runs,
            full_system or record["full_system"],
            pretrainings,
            parent_run_id,
            notes=[f"Not in the table: {', '.join(missing)}."] if missing else [],
        )

    def chosen(
        self,
        run_ids: Sequence[str],
        full_system: str | None = None,
        *,
        flag: str = "--runs",
        first_is_compared: bool = False,
    ) -> Collection:
        """Read runs by their ids. Rows, full system and paper scores come from the runs' tags.

        Args:
            full_system: the row with which others are compared; None takes the one in the tags.
            flag: the option that gave the ids, for errors.
            first_is_compared: whether others are compared with the row of the first run, if
                `full_system` is None.
        """
        runs = [self._run(run_id, flag) for run_id in dict.fromkeys(run_ids)]
        first = run_ids[0] if first_is_compared and len(runs) > 1 else None
        return self._collect("Runs", runs, full_system, only_finished=False, compared=first)

    def experiment(self, name: str, full_system: str | None = None) -> Collection:
        """Read every finished run of an experiment, except for the parents of sweeps.

        Value pretrainings go into `Collection.pretrainings`.
        """
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            raise UserError(f"--experiment {name}: no such experiment in {self.store.shown_uri}")
        runs = self._search(experiment.experiment_id)
        return self._collect(f"Experiment {name}", runs, full_system, only_finished=True)

    def _search(self, experiment_id: str, filter_string: str = "") -> list[Any]:
        """Return all runs of an experiment that match the filter, oldest first."""
        runs: list[Any] = []
        token, order = None, ["attributes.start_time ASC"]
        while token != "":
            page = self.client.search_runs(
                [experiment_id], filter_string, max_results=_PAGE, order_by=order, page_token=token
            )
            runs += page
            token = page.token or ""
        return runs

    def _collect(
        self,
        title: str,
        runs: Sequence[Any],
        full_system: str | None,
        *,
        only_finished: bool,
        compared: str | None = None,
    ) -> Collection:
        """Group runs into rows, by their names and by all that decides their numbers.

        Args:
            full_system: the row with which others are compared. None takes the row of the run
                `compared`, or else the only row that a sweep tagged as full system.
            only_finished: whether to leave out unfinished runs.
            compared: the id of a run.
        """
        candidates, notes = usable_runs(map(make_recorded_run, runs), only_finished=only_finished)
        pretrainings: dict[str, Any] = {}
        recorded_runs = [
            replace(recorded, facts=self._facts(recorded.mlflow_run, pretrainings))
            for recorded in candidates
        ]
        rows, row_notes = separate_rows(
            recorded for recorded in recorded_runs if recorded.role != "value_pretraining"
        )
        pretraining_rows, pretraining_notes = separate_rows(
            recorded for recorded in recorded_runs if recorded.role == "value_pretraining"
        )
        notes += [*row_notes, *pretraining_notes]
        if not rows:
            kind = "finished run" if only_finished else "run"
            raise UserError(" ".join([f"{title}: no {kind} with a recorded evaluation.", *notes]))
        if full_system is None and compared is not None and len(rows) > 1:
            ids = {
                row: {r.mlflow_run.info.run_id for r in row_runs} for row, row_runs in rows.items()
            }
            full_system = next((row for row in rows if compared in ids[row]), None)
        full_systems = [row for row, row_runs in rows.items() if _tag(row_runs, "full_system")]
        if full_system is None and len(full_systems) > 1:
            notes.append(
                f"No row is compared with another: {len(full_systems)} rows are a full system "
                f"({', '.join(full_systems)}); choose one with --full_system."
            )
        elif full_system is None:
            full_system = next(iter(full_systems), None)
        return Collection(
            title,
            [_row(name, row_runs) for name, row_runs in rows.items()],
            self._records(rows),
            full_system,
            self._records(pretraining_rows),
            notes=tuple(notes),
        )

    def _facts(self, run: Any, pretrainings: dict[str, Any]) -> dict[str, str]:
        """Return a run's facts (`identity_facts`).

        Args:
            pretrainings: a cache, identity -> MLflow's run of that value pretraining, None if there
                is none.
        """
        identity = pretraining_identity(run.data.params.get(CRITIC_INIT, ""))
        if identity is not None and identity not in pretrainings:
            finished = f"attributes.status = 'FINISHED' and tags.identity = '{identity}'"
            matching_runs = self._search(run.info.experiment_id, finished)
            pretrainings[identity] = next(reversed(matching_runs), None)
        pretraining = None if identity is None else pretrainings[identity]
        name, run_id = "config_resumed.yaml", run.info.run_id
        is_there = name in {file.path for file in self.client.list_artifacts(run_id)}
        return identity_facts(run, self._artifact(run_id, name) if is_there else None, pretraining)

    def _evaluated(self, run_id: str | None) -> RecordedRun | None:
        """Return a run of the store; None if it is missing or has no evaluation."""
        run = self._find(run_id) if run_id else None
        recorded = None if run is None else make_recorded_run(run)
        return recorded if recorded and recorded.score is not None else None

    def _records(self, rows: Mapping[str, Sequence[RecordedRun]]) -> list[RunRecord]:
        return [self._record(run, row, run.seed) for row, runs in rows.items() for run in runs]

    def _record(self, recorded: RecordedRun, row: str, seed: int) -> RunRecord:
        run_id, metrics = recorded.mlflow_run.info.run_id, recorded.mlflow_run.data.metrics
        history = {
            key: {
                recorded.step: recorded.value
                for stored in names
                for recorded in self.client.get_metric_history(run_id, stored)
            }
            for key in HISTORIES
            if (names := stored_names(metrics, key))
        }
        names = sorted(file.path for file in self.client.list_artifacts(run_id, "diagnostics"))
        tables = [self._artifact(run_id, name) for name in names if name.endswith(".json")]
        positions = [json.loads(table) for table in tables]
        heldout = prompt_digests(recorded.mlflow_run).get("evaluation")
        if heldout is not None:  # an evaluation may take only the first of these prompts
            heldout += f" {metrics.get('eval/num_prompts', '')}"
        return RunRecord(run_id, row, seed, history, positions, heldout, self._prompts(run_id))

    def _prompts(self, run_id: str) -> PromptHistory:
        """Return a run's scores of single prompts; empty if the store does not have them (yet)."""
        if SCORES_NAME not in {file.path for file in self.client.list_artifacts(run_id)}:
            return PromptHistory()
        try:
            return history_of(self._artifact(run_id, SCORES_NAME))
        except (LookupError, ValueError):  # it cannot be fetched, or is not text
            return PromptHistory()

    def _find(self, run_id: str) -> Any | None:
        from mlflow.exceptions import MlflowException

        with suppress(MlflowException):
            return self.client.get_run(run_id)
        return None

    def _run(self, run_id: str, flag: str) -> Any:
        if (run := self._find(run_id)) is not None:
            return run
        hint = "; another store is given with --tracking_uri"
        if (Path(run_id) / SWEEP_RECORD).is_file():
            hint = f"; for the folder of a sweep: vapo report {run_id}"
        raise UserError(f"{flag} {run_id}: no such run in {self.store.shown_uri}{hint}")

    def _artifact(self, run_id: str, name: str) -> str:
        """Return the text of a run's artifact.

        Raises: LookupError: it is missing or cannot be read.
        """
        from mlflow.exceptions import MlflowException

        try:
            with tempfile.TemporaryDirectory() as folder:  # this client knows the run's server
                return Path(self.client.download_artifacts(run_id, name, folder)).read_text()
        except (MlflowException, OSError) as error:
            raise LookupError(name) from error


def _row(name: str, runs: Sequence[RecordedRun]) -> GridRow:
    off, paper = _tag(runs, "component_off") or "none", _tag(runs, "paper_score")
    score = None if paper is None else float(paper)
    return GridRow(name, component_off="" if off == "none" else off, paper_score=score)


def _tag(runs: Sequence[RecordedRun], key: str) -> str | None:
    """Return the tag `key` of the latest run that has it; None if no run has it."""
    tags = (run.mlflow_run.data.tags.get(key) for run in reversed(runs))
    return next((tag for tag in tags if tag), None)
