"""Runs as a report needs them, read from MLflow: of a sweep, by id, or of an experiment."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vapo.errors import UserError
from vapo.tracking.stores import Store

if TYPE_CHECKING:
    from mlflow import MlflowClient

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

SCORE = "eval/avg_at_k"
_HISTORIES = (
    SCORE,
    "rollout/response_length_mean",
    "rollout/reward_mean",
    "actor/entropy",
    "critic/value_loss",
    "critic/explained_variance",
    "progress/phase",
    "progress/policy_steps",
)
_MAX_RUNS = 1000

History = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class RowInfo:
    """One line of the table, as the grid has it."""

    name: str
    system: str = ""
    component_off: str = ""
    paper_score: float | None = None


@dataclass(frozen=True)
class RunRecord:
    """One run. `history`: metric -> step -> value; `positions`: the position diagnostics."""

    run_id: str
    row: str
    seed: int
    history: History = field(default_factory=dict)
    positions: Sequence[Mapping[str, Any]] = ()

    def score(self, within: int | None = None) -> float | None:
        """avg@k of the last evaluation, or of the last within so many policy steps."""
        steps = self.history.get("progress/policy_steps", {})
        scores = {
            at: value
            for at, value in self.history.get(SCORE, {}).items()
            if within is None or steps.get(at, 0) <= within
        }
        return scores[max(scores)] if scores else None


@dataclass(frozen=True)
class Collection:
    """The runs of one report.

    `missing`: rows' runs that failed or are not in the store. `within`: the table takes the last
    evaluation within so many optimizer steps of the policy; None: the last of the run.
    """

    title: str
    rows: Sequence[RowInfo]
    runs: Sequence[RunRecord]
    full_system: str | None = None
    pretrainings: Sequence[RunRecord] = ()
    missing: Sequence[str] = ()
    parent_run_id: str | None = None
    within: int | None = None

    def of_row(self, name: str) -> list[RunRecord]:
        return [run for run in self.runs if run.row == name]


class Reader:
    """Reads runs from one store."""

    def __init__(self, store: Store) -> None:
        from mlflow import MlflowClient

        store.hand_over_credentials()
        self.client: MlflowClient = MlflowClient(store.client_uri)
        self.store = store

    def sweep(self, parent_run_id: str, full_system: str | None = None) -> Collection:
        """A sweep's runs, by its record; raises UserError if the run is no sweep's parent."""
        parent = self._run(parent_run_id, "--sweep")
        try:
            record = json.loads(self._artifact(parent_run_id, "sweep.json"))
        except (LookupError, ValueError):
            raise UserError(
                f"--sweep {parent_run_id}: this run has no sweep.json, so it is not the parent of "
                "a sweep; give the id that `vapo sweep` printed, or use --runs"
            ) from None
        runs, missing = [], []
        for entry in record["runs"]:
            found = entry["mlflow_run_id"] and self._record(
                entry["mlflow_run_id"], entry["row"], entry["seed"]
            )
            if entry["state"] == "finished" and found:
                runs.append(found)
            else:
                missing.append(f"{entry['row']}/{entry['seed']} ({entry['state']})")
        return Collection(
            title=f"Sweep {record['grid']}",
            rows=[
                RowInfo(r["row"], r["system"], r["component_off"], r["paper_score"])
                for r in record["rows"]
            ],
            runs=runs,
            full_system=full_system or record["full_system"],
            pretrainings=self._pretrainings(record["value_pretrainings"]),
            missing=missing,
            parent_run_id=str(parent.info.run_id),
        )

    def chosen(self, run_ids: Sequence[str], full_system: str | None = None) -> Collection:
        """Runs by id; rows, systems and paper scores from their tags."""
        return self._tagged(
            "Runs", [self._run(run_id, "--runs") for run_id in run_ids], full_system
        )

    def experiment(self, name: str, full_system: str | None = None) -> Collection:
        """Every finished run of an experiment, sweeps' parents and value pretrainings apart."""
        found = self.client.get_experiment_by_name(name)
        if found is None:
            raise UserError(f"--experiment {name}: no such experiment in {self.store.shown_uri}")
        runs = self.client.search_runs(
            [found.experiment_id],
            filter_string="attributes.status = 'FINISHED'",
            max_results=_MAX_RUNS,
            order_by=["attributes.start_time ASC"],
        )
        return self._tagged(f"Experiment {name}", runs, full_system)

    def _tagged(self, title: str, runs: Sequence[Any], full_system: str | None) -> Collection:
        rows: dict[str, RowInfo] = {}
        records: dict[str, list[RunRecord]] = {"row": [], "value_pretraining": []}
        for run in runs:
            tags, name = run.data.tags, run.info.run_name
            role = tags.get("role", "row")
            seed = int(tags.get("seed") or run.data.params.get("seed") or 0)
            row = tags.get("row") or name.removesuffix(f"/{seed}").removesuffix(f"-seed{seed}")
            record = self._record(run.info.run_id, row, seed)
            if role not in records or record is None:
                continue
            records[role].append(record)
            if role == "row":
                off = tags.get("component_off", "").replace("none", "")
                paper = float(tags["paper_score"]) if "paper_score" in tags else None
                rows.setdefault(row, RowInfo(row, tags.get("system", ""), off, paper))
                full_system = full_system or (row if tags.get("full_system") else None)
        if not rows:
            raise UserError(f"{title}: no finished run with a recorded evaluation")
        if full_system is not None and full_system not in rows:
            raise UserError(f"--full_system {full_system}: not a row; rows: {', '.join(rows)}")
        return Collection(
            title, list(rows.values()), records["row"], full_system, records["value_pretraining"]
        )

    def _pretrainings(self, entries: Sequence[Mapping[str, Any]]) -> list[RunRecord]:
        found = []
        for entry in entries:
            if entry["mlflow_run_id"]:
                run = self._run(entry["mlflow_run_id"], "sweep.json")
                name, _, seed = run.info.run_name.rpartition("/")
                record = self._record(run.info.run_id, name, int(seed))
                found += [record] if record else []
        return found

    def _record(self, run_id: str, row: str, seed: int) -> RunRecord | None:
        """None for a run that is not in the store, or evaluated nothing."""
        from mlflow.exceptions import MlflowException

        try:
            logged = self.client.get_run(run_id).data.metrics
        except MlflowException:
            return None
        if SCORE not in logged:
            return None
        history = {
            key: {m.step: m.value for m in self.client.get_metric_history(run_id, key)}
            for key in _HISTORIES
            if key in logged
        }
        return RunRecord(run_id, row, seed, history, self._positions(run_id))

    def _positions(self, run_id: str) -> list[dict[str, Any]]:
        names = sorted(file.path for file in self.client.list_artifacts(run_id, "diagnostics"))
        chosen = [name for name in names if name.endswith(".json")]
        return [json.loads(self._artifact(run_id, name)) for name in chosen]

    def _run(self, run_id: str, flag: str) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_run(run_id)
        except MlflowException:
            raise UserError(f"{flag} {run_id}: no such run in {self.store.shown_uri}") from None

    def _artifact(self, run_id: str, name: str) -> str:
        """Raises: LookupError when there is none."""
        from mlflow.exceptions import MlflowException

        try:
            with tempfile.TemporaryDirectory() as folder:  # by this client: of its own server
                return Path(self.client.download_artifacts(run_id, name, folder)).read_text()
        except (MlflowException, OSError) as error:
            raise LookupError(name) from error
