"""Runs as a report needs them, read from MLflow: of a sweep, by id, or of an experiment."""

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
from vapo.sweep.folders import SWEEP_RECORD, pretraining_of
from vapo.sweep.grid import GridRow
from vapo.sweep.report.rows import (
    CRITIC_INIT,
    Recorded,
    as_recorded,
    facts_of,
    prompts_of,
    separate_rows,
    usable,
)
from vapo.sweep.report.run_records import HISTORIES, RunRecord
from vapo.tracking.metric_names import stored_names
from vapo.tracking.prompt_scores import SCORES_NAME, PromptHistory, history_of
from vapo.tracking.stores import Store

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

_PAGE = 1000


@dataclass(frozen=True)
class Collection:
    """The runs of one report, at most one of each row and seed.

    `notes`: sentences on how the rows were separated and which runs were left out, failed or are
    not in the store. `within`: the table takes the last evaluation within so many optimizer
    steps of the policy; None: the last of the run.

    Raises: UserError if the full system is not one of the rows.
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
    """Reads runs from one store."""

    def __init__(self, store: Store) -> None:
        self.client = store.client()
        self.store = store

    def sweep(
        self, parent_run_id: str, full_system: str | None = None, *, named: str = "--sweep"
    ) -> Collection:
        """A sweep's runs, by its record; raises UserError if the run is no sweep's parent.

        `named`: where the id is from, for the errors.
        """
        self._run(parent_run_id, named)
        try:
            record = json.loads(self._artifact(parent_run_id, SWEEP_RECORD))
        except (LookupError, ValueError):
            raise UserError(
                f"{named} {parent_run_id}: this run in {self.store.shown_uri} has no sweep.json, "
                "so it is not the parent of a sweep; give the id that `vapo sweep` printed, or use "
                "--runs"
            ) from None
        lost = "finished, but not in the store or without an evaluation"
        runs, pretrainings, missing = [], [], []
        for entry in record["runs"]:
            one, state = self._evaluated(entry["mlflow_run_id"]), entry["state"]
            if state == "finished" and one is not None:
                runs.append(self._record(one, entry["row"], entry["seed"]))
            else:
                why = lost if state == "finished" else state
                missing.append(f"{entry['row']}/{entry['seed']} ({why})")
        for entry in record["value_pretrainings"]:
            if (one := self._evaluated(entry["mlflow_run_id"])) is not None:
                pretrainings.append(self._record(one, one.name, one.seed))
            elif entry["state"] == "finished":
                missing.append(f"value pretraining {entry['identity']} ({lost})")
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

    def chosen(self, run_ids: Sequence[str], full_system: str | None = None) -> Collection:
        """Runs by id; rows, systems and paper scores from their tags."""
        runs = [self._run(run_id, "--runs") for run_id in dict.fromkeys(run_ids)]
        return self._collect("Runs", runs, full_system, only_finished=False)

    def experiment(self, name: str, full_system: str | None = None) -> Collection:
        """Every finished run of an experiment, sweeps' parents and value pretrainings apart."""
        found = self.client.get_experiment_by_name(name)
        if found is None:
            raise UserError(f"--experiment {name}: no such experiment in {self.store.shown_uri}")
        runs = self._search(found.experiment_id)
        return self._collect(f"Experiment {name}", runs, full_system, only_finished=True)

    def _search(self, experiment_id: str, filter_string: str = "") -> list[Any]:
        """All of them, oldest first."""
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
        self, title: str, runs: Sequence[Any], full_system: str | None, *, only_finished: bool
    ) -> Collection:
        """Rows from the runs' names and from all that decides their numbers."""
        chosen, notes = usable(map(as_recorded, runs), only_finished=only_finished)
        pretrainings: dict[str, Any] = {}
        known = [replace(one, facts=self._facts(one.run, pretrainings)) for one in chosen]
        rows, of_rows = separate_rows(one for one in known if one.role != "value_pretraining")
        first, of_first = separate_rows(one for one in known if one.role == "value_pretraining")
        notes += [*of_rows, *of_first]
        if not rows:
            kind = "finished run" if only_finished else "run"
            raise UserError(" ".join([f"{title}: no {kind} with a recorded evaluation.", *notes]))
        marked = [row for row, found in rows.items() if _tag(found, "full_system")]
        if full_system is None and len(marked) > 1:
            notes.append(
                f"No row is compared with another: {len(marked)} rows are a full system "
                f"({', '.join(marked)}); choose one with --full_system."
            )
        elif full_system is None:
            full_system = next(iter(marked), None)
        return Collection(
            title,
            [_row(name, found) for name, found in rows.items()],
            self._records(rows),
            full_system,
            self._records(first),
            notes=tuple(notes),
        )

    def _facts(self, run: Any, pretrainings: dict[str, Any]) -> dict[str, str]:
        """`pretrainings`: those that were found so far, by identity."""
        identity = pretraining_of(run.data.params.get(CRITIC_INIT, ""))
        if identity is not None and identity not in pretrainings:
            finished = f"attributes.status = 'FINISHED' and tags.identity = '{identity}'"
            found = self._search(run.info.experiment_id, finished)
            pretrainings[identity] = next(reversed(found), None)
        pretraining = None if identity is None else pretrainings[identity]
        name, run_id = "config_resumed.yaml", run.info.run_id
        is_there = name in {file.path for file in self.client.list_artifacts(run_id)}
        return facts_of(run, self._artifact(run_id, name) if is_there else None, pretraining)

    def _evaluated(self, run_id: str | None) -> Recorded | None:
        """A run of the store; None where it is not there, or evaluated nothing."""
        run = self._find(run_id) if run_id else None
        one = None if run is None else as_recorded(run)
        return one if one and one.score is not None else None

    def _records(self, rows: Mapping[str, Sequence[Recorded]]) -> list[RunRecord]:
        return [self._record(one, row, one.seed) for row, runs in rows.items() for one in runs]

    def _record(self, one: Recorded, row: str, seed: int) -> RunRecord:
        run_id, metrics = one.run.info.run_id, one.run.data.metrics
        history = {
            key: {
                one.step: one.value
                for stored in names
                for one in self.client.get_metric_history(run_id, stored)
            }
            for key in HISTORIES
            if (names := stored_names(metrics, key))
        }
        names = sorted(file.path for file in self.client.list_artifacts(run_id, "diagnostics"))
        tables = [self._artifact(run_id, name) for name in names if name.endswith(".json")]
        positions = [json.loads(table) for table in tables]
        heldout = prompts_of(one.run).get("evaluation")
        if heldout is not None:  # of which an evaluation may take the first
            heldout += f" {metrics.get('eval/num_prompts', '')}"
        return RunRecord(run_id, row, seed, history, positions, heldout, self._prompts(run_id))

    def _prompts(self, run_id: str) -> PromptHistory:
        """The scores of single prompts; none of a run that is older, or has not ended."""
        if SCORES_NAME not in {file.path for file in self.client.list_artifacts(run_id)}:
            return PromptHistory()
        try:
            return history_of(self._artifact(run_id, SCORES_NAME))
        except (LookupError, ValueError):  # it cannot be fetched, or is no text
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
        """Raises: LookupError when there is none."""
        from mlflow.exceptions import MlflowException

        try:
            with tempfile.TemporaryDirectory() as folder:  # by this client: of its own server
                return Path(self.client.download_artifacts(run_id, name, folder)).read_text()
        except (MlflowException, OSError) as error:
            raise LookupError(name) from error


def _row(name: str, runs: Sequence[Recorded]) -> GridRow:
    off, paper = _tag(runs, "component_off") or "none", _tag(runs, "paper_score")
    score = None if paper is None else float(paper)
    return GridRow(name, component_off="" if off == "none" else off, paper_score=score)


def _tag(runs: Sequence[Recorded], key: str) -> str | None:
    """Of the latest run that has it: a grid may have been changed in between."""
    tags = (one.run.data.tags.get(key) for one in reversed(runs))
    return next((tag for tag in tags if tag), None)
