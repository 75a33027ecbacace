"""A Lightning logger that records a run in MLflow, and never delays or ends the training."""

from __future__ import annotations

import atexit
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.loggers import Logger

from vapo.config.schema import TrackingConfig
from vapo.errors import UserError
from vapo.system.process import is_main_process
from vapo.tracking.also import Also, check_also
from vapo.tracking.delivery import Delivery, DeliveryReport
from vapo.tracking.journal import Journal
from vapo.tracking.journal_folders import cannot_write_journal, set_aside_others
from vapo.tracking.metric_names import present_name
from vapo.tracking.opening import open_store
from vapo.tracking.provenance import provenance_tags
from vapo.tracking.records import TABLES_TAG, Clock, InputData, Kind, Record, table_json, with_table
from vapo.tracking.sink import MlflowSink, active_run
from vapo.tracking.stores import locate_store, what_was_not_sent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FLUSH_S = 30.0


class RunLogger(Logger):
    """A Lightning logger that records a run in MLflow, with delivery in the background.

    It opens the store, and begins a run or resumes `run_id`; if the store has lost that run, it
    begins a new one. Every `log_*` returns at once. Records arrive in order and only once, all of
    them by `close`. If the store fails, the training continues: records wait in the journal and are
    sent again, and `close` says how many are left and which command sends them. Lightning's
    `finalize` only waits for what was logged so far, because a run outlives its `Trainer.fit`;
    `close` ends the run. On ranks other than 0 every method does nothing. Use it as a context
    manager.

    Metrics are recorded at their step minus `policy_begins_at`, so that 0 is where the policy phase
    begins, and steps of value pretraining are below 0.

    Args:
        note: receives lines for the user, about the wait for a new store and trouble during the
            run.
        journal: the folder in which records are kept until the store has them; those of an
            interrupted run are sent first. If it is None, records are kept in memory.
        loggers: the user's own loggers, which get metrics and config as well.

    Raises: UserError: the store or the journal cannot be used. This takes seconds at most.
    """

    # the last step of each metric that earlier processes of this run recorded, and the first of all
    recorded_steps: Mapping[str, int] = {}
    first_recorded_step = 0
    policy_begins_at = 0
    experiment_id: str | None = None
    run_id: str | None = None
    run_name = ""
    is_resumed = False

    def __init__(
        self,
        tracking: TrackingConfig,
        *,
        run_name: str,
        run_id: str | None = None,
        tags: Mapping[str, str] = {},
        note: Callable[[str], None] = print,
        journal: Path | None = None,
        loggers: Sequence[Logger] = (),
    ) -> None:
        super().__init__()
        self.store = locate_store(tracking.uri)
        self.tags: dict[str, str] = {}
        self.run_id, self.is_resumed = run_id, run_id is not None
        self._experiment_name = tracking.experiment
        self._note: Callable[[str], None] = lambda text: note(self.store.redact(text))
        self._delivery: Delivery | None = None
        self._report: DeliveryReport | None = None
        self._tables = "[]"
        self._journal = Journal(None)
        self._nonfinite: set[str] = set()
        self._clock = Clock()
        self._skip_up_to: Mapping[str, int] = {}
        self._also: Also | None = None
        self._is_unused = run_id is None  # a new run, of which nothing was measured yet
        if not is_main_process():
            return
        check_also(tracking)
        self.experiment_id = open_store(self.store, tracking.experiment, note)
        if journal is not None:
            set_aside_others(journal, run_id, note)
        self._journal = Journal(journal)
        self.tags = {**provenance_tags(), **tracking.tags, **tags}
        try:
            self._begin(run_name, self.experiment_id)
            if tracking.also and journal is None:
                self._note("tracking.also: a command without a run's folder records in MLflow only")
            elif journal is not None and (tracking.also or loggers):
                self._also = Also(
                    tracking, journal.parent, self.run_name, str(self.run_id), self._note, loggers
                )
        except BaseException as error:
            self.__exit__(type(error))
            raise

    def _begin(self, run_name: str, experiment_id: str) -> None:
        """Create the run, or set a resumed one back to RUNNING, and start delivery."""
        from mlflow import set_tracking_uri
        from mlflow.exceptions import MlflowException
        from mlflow.tracking.context.registry import resolve_tags

        earlier, store = self.run_id, self.store
        set_tracking_uri(store.client_uri)  # what a client does with artifacts asks for it
        client = store.client()
        try:
            run = active_run(client, earlier) if earlier else None
            if run is None:  # a new one, or the store has lost it
                tags = resolve_tags(dict(self.tags))  # with MLflow's: who started what, and where
                run = client.create_run(experiment_id, run_name=run_name, tags=tags)
        except MlflowException as error:
            action = f"resume run {earlier}" if earlier else "begin a run"
            text = f"tracking.uri: cannot {action} in {store.shown_uri}: {error}"
            raise UserError(store.redact(text)) from error
        self.run_id = str(run.info.run_id)
        self.run_name = str(run.info.run_name or run_name)
        self.is_resumed = self.run_id == earlier
        if earlier and not self.is_resumed:
            self.tags |= {"continues": earlier, TABLES_TAG: "[]"}  # its tables are gone with it
        self._take_over_journal(self.run_id, earlier)
        self._tables = self.tags.get(TABLES_TAG) or run.data.tags.get(TABLES_TAG, "[]")
        steps: dict[str, int] = {}
        for record in self._journal.records():  # what earlier processes of this run recorded
            if record.kind == "tags" and self.is_resumed:
                self._tables = record.payload.get(TABLES_TAG, self._tables)
            for key, _, at_ms, step in record.payload if record.kind == "metrics" else ():
                self._clock.after(at_ms)  # times are not given again if the clock was set back
                name = present_name(key)
                steps[name] = max(step, steps.get(name, step))
                self.first_recorded_step = min(step, self.first_recorded_step)
        self.recorded_steps = steps
        sink = MlflowSink(client, self.run_id)
        missing = sink.missing if store.is_http else None  # a proxy may stand before a server
        self._delivery = Delivery(
            sink, self._note, self._journal, redact=store.redact, missing=missing
        )
        atexit.register(self.close, "KILLED")
        if self.is_resumed:
            self._submit("status", ("RUNNING", self._clock.now_ms()))
        if earlier:
            self.set_tags(self.tags)

    def _take_over_journal(self, run_id: str, earlier: str | None) -> None:
        """Write into the journal that its records belong to the run `run_id`.

        If the store has lost the run `earlier`, all records in the journal are sent to the new run,
        except params, inputs and the status, which this process records anew.

        Raises: UserError: the journal cannot be written.
        """
        journal = self._journal
        try:
            if earlier and not self.is_resumed:
                journal.start_over(without=("params", "inputs", "status"))
                self._note(
                    f"tracking: the run {earlier} is not in {self.store.shown_uri} any more; it is "
                    f"continued in the new run {run_id}, which gets the {len(journal)} records of "
                    "its history that are still in the run's folder"
                )
            elif journal:
                self._note(f"tracking: {len(journal)} records of the interrupted run are sent now")
            journal.bind(self.store.shown_uri, run_id)
        except OSError as error:
            raise cannot_write_journal(journal.folder, error) from None

    @property
    def name(self) -> str | None:
        """The experiment's id, as in Lightning's own MLflow logger."""
        return self.experiment_id

    @property
    def version(self) -> str | None:
        return self.run_id

    def skip_recorded(self) -> None:
        """Leave out, from now on, every metric at a step at which an earlier process recorded it.

        A resumed run computes the same values again, from its last checkpoint to where it was
        interrupted.
        """
        self._skip_up_to = self.recorded_steps

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values at a step of the trainer. Infinite ones become nan, with a note.

        (MLflow's SQL store would turn inf into 1.8e308, which reads as a number.)
        """
        self._is_unused = False
        items = []
        at_ms = self._clock.now_ms()
        recorded_step = (step or 0) - self.policy_begins_at
        for name, value in metrics.items():
            key = re.sub(r"[^\w/. :-]", "_", name)
            if recorded_step <= self._skip_up_to.get(key, -math.inf):
                continue
            number = float(value)
            if math.isinf(number):
                if name not in self._nonfinite:
                    self._nonfinite.add(name)
                    self._note(
                        f"tracking: {name} is {number} at step {recorded_step}; recorded as nan"
                    )
                number = math.nan
            items.append((key, number, at_ms, recorded_step))
        if items:
            self._submit("metrics", items)
            if self._also is not None:
                self._also.log_metrics({key: number for key, number, *_ in items}, recorded_step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the resolved config is recorded once, by `log_config`."""

    def log_config(self, config_yaml: str, flat_params: Mapping[str, Any]) -> None:
        """Log the resolved config as the artifact config.yaml, and in a new run as params.

        MLflow's params are immutable, so a resumed run keeps its first ones. The config with which
        it was resumed is the artifact config_resumed.yaml.
        """
        if self._also is not None:
            self._also.log_config(flat_params)
        if self.is_resumed:
            self.log_text(config_yaml, "config_resumed.yaml")
            return
        self._submit("params", {key: str(value) for key, value in flat_params.items()})
        self.log_text(config_yaml, "config.yaml")

    def log_table(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """Log rows as an MLflow table, such as `samples/step_000010.json`; replace an old one."""
        self.log_text(table_json(rows), name)
        self._tables = with_table(self._tables, name)
        self.set_tags({TABLES_TAG: self._tables})

    def log_text(self, text: str, name: str) -> None:
        self._submit("file", text.encode("utf-8", "replace"), name)

    def log_figure(self, figure: Figure, name: str) -> None:
        """Draw a figure in the format of the name's suffix (png, svg, pdf), and queue it."""
        if self._delivery is None:
            return
        buffer = io.BytesIO()
        figure.savefig(buffer, format=Path(name).suffix[1:] or "png", bbox_inches="tight")
        self._submit("file", buffer.getvalue(), name)

    def log_inputs(self, inputs: Sequence[InputData]) -> None:
        """Log a new run's data sets as MLflow's dataset inputs; if it is resumed, do nothing."""
        if not self.is_resumed:
            self._submit("inputs", list(inputs))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._submit("tags", {key: str(value) for key, value in tags.items()})

    def describe_score(self, line: str) -> None:
        """Put a line with the score at the top of the run's description (`records.with_score`)."""
        self._submit("note", line)

    def finalize(self, status: str = "success") -> None:
        """Wait for delivery, when Lightning's fit or validation ends; the run stays open."""
        if self._delivery is not None and self._report is None:
            self._delivery.flush(_FLUSH_S)

    def sync(self) -> None:
        """Force what was logged so far to the disk, so that it outlives a power cut."""
        if self._delivery is not None and self._report is None:
            self._delivery.sync()

    def close(self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED") -> int:
        """Deliver the last records and end the run; return the number not delivered."""
        if self._delivery is None:
            return 0
        if self._report is None:
            atexit.unregister(self.close)
            if self._also is not None:
                self._also.close(is_finished=status == "FINISHED")
            self._submit("status", (status, self._clock.now_ms()))
            self._report = self._delivery.close()
            self._journal.close()
            for line in what_was_not_sent(self._report, self._journal.folder, self.store):
                self._note(line)
        return self._report.undelivered

    def discard_journal(self) -> None:
        """Remove the journal if the store has all its records and the run is never resumed."""
        report = self._report
        if report is None:  # no run began
            self._journal.close()
            is_sent = len(self._journal) == 0
        else:
            is_sent = not (report.undelivered or report.refused)
        if is_sent:
            self._journal.discard()

    def describe(self) -> str:
        """Return a text that names the run, its experiment and its store, for the summary."""
        return (
            f"MLflow run {self.run_id}, experiment '{self._experiment_name}', "
            f"{self.store.database or self.store.shown_uri}"
        )

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            self.close("FINISHED")
        else:
            self.close("FAILED" if issubclass(exc_type, Exception) else "KILLED")
            if issubclass(exc_type, UserError) and self._is_unused:
                self.discard_journal()  # the start was refused: there is nothing to resume

    def _submit(self, kind: Kind, payload: Any, name: str = "") -> None:
        if self._delivery is not None:
            self._delivery.submit(Record(kind, payload, name))
