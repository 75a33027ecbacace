"""Recording of a run in MLflow: a Lightning logger that never delays or kills the training."""

from __future__ import annotations

import atexit
import io
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.loggers import Logger

from vapo.config.schema import TrackingConfig
from vapo.system.main_process import is_main_process
from vapo.tracking.delivery import Delivery, DeliveryReport
from vapo.tracking.journal import Journal, cannot_write, set_aside_others
from vapo.tracking.partial_uploads import remove_partial_uploads
from vapo.tracking.provenance import provenance_tags
from vapo.tracking.records import Clock, InputData, Record
from vapo.tracking.stores import MlflowSink, Store, begin_run, locate_store, open_store
from vapo.tracking.tables import TABLES_TAG, only_tables, table_json, with_table
from vapo.tracking.undelivered import what_was_not_sent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
_FLUSH_S = 30.0


def make_run_logger(
    tracking: TrackingConfig,
    *,
    run_name: str,
    run_id: str | None = None,
    tags: Mapping[str, str] = {},
    note: Callable[[str], None] = print,
    journal: Path | None = None,
) -> RunLogger:
    """Open the store and begin a run, or resume `run_id`; a new one if the store has lost it.

    `note` receives lines for the user: the wait for a new store, trouble during the run.
    `journal` is the folder `tracking` of the run's own folder, where records are kept until
    the store has them; what an interrupted run left there is sent first. None: in memory.

    Raises: UserError, within seconds, if the store or the journal cannot be used.
    """
    store = locate_store(tracking.uri)
    if not is_main_process():
        return RunLogger(store, tracking.experiment, run_id=run_id)
    if journal is not None:
        set_aside_others(journal, run_id, note)
    records = Journal(journal)
    experiment_id = open_store(store, tracking.experiment, note)
    logger = RunLogger(
        store,
        tracking.experiment,
        run_name=run_name,
        run_id=run_id,
        tags={**provenance_tags(), **tracking.tags, **tags},
        note=note,
    )
    logger.begin(experiment_id, records)
    return logger


class RunLogger(Logger):
    """A Lightning logger to MLflow, with delivery in the background.

    Every `log_*` returns at once; records arrive in order, once, all of them by `close`. If the
    store fails, the run goes on: records wait in the journal and are sent again, and `close`
    says how many are left and by which command to send them. Lightning's own `finalize` only
    waits for what was logged so far, because a run outlives its `Trainer.fit`; `close` ends it.
    On ranks other than 0 every method does nothing. Made by `make_run_logger`; use it as a
    context manager.
    """

    def __init__(
        self,
        store: Store,
        experiment: str,
        *,
        run_name: str | None = None,
        run_id: str | None = None,
        tags: Mapping[str, str] = {},
        note: Callable[[str], None] = print,
    ) -> None:
        super().__init__()
        self.store = store
        self.tags = dict(tags)
        self._experiment_name = experiment
        self._experiment_id: str | None = None
        self._run_name = run_name
        self._run_id = run_id
        self._resumed = run_id is not None
        self._note: Callable[[str], None] = lambda text: note(store.redact(text))
        self._delivery: Delivery | None = None
        self._report: DeliveryReport | None = None
        self._tables = "[]"
        self._nonfinite: set[str] = set()
        self._clock = Clock()
        self._journal = Journal(None)
        self._recorded_steps: dict[str, int] = {}
        self._skip_up_to: Mapping[str, int] = {}

    def begin(self, experiment_id: str, journal: Journal) -> None:
        """Create the run, or set a resumed one back to RUNNING, and start delivery."""
        self._experiment_id, self._journal, earlier = experiment_id, journal, self._run_id
        client, run = begin_run(self.store, experiment_id, earlier, self._run_name, self.tags)
        self._run_id = str(run.info.run_id)
        self._resumed = self._run_id == earlier
        if earlier and not self._resumed:
            self.tags["continues"] = earlier
        self._take_over(journal, self._run_id, earlier)
        self._read_history(journal, run.data.tags.get(TABLES_TAG, "[]"))
        self._delivery = Delivery(
            MlflowSink(client, self._run_id), self._note, journal, redact=self.store.redact
        )
        atexit.register(self.close, "KILLED")
        if self._resumed:
            self._submit(Record("status", ("RUNNING", self._clock.now_ms())))
        if earlier:
            self.set_tags(self.tags)

    def _take_over(self, journal: Journal, run_id: str, earlier: str | None) -> None:
        """The journal is the run's from now on; it was that of the run `earlier`, if not None.

        Where that is another run, because the store has lost it, all its records are to be sent
        again, but for what the process that continues says by itself: params, inputs, the status.
        """
        try:
            if earlier and not self._resumed:
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
            raise cannot_write(journal.folder, error) from None
        has_it_alone = self._resumed and journal.folder is not None
        remove_partial_uploads(self.store, run_id if has_it_alone else None)

    def _read_history(self, journal: Journal, tables: str) -> None:
        """What the processes before this one recorded, and at which times: no time is used again,
        even if this host's clock has gone back."""
        names = set[str]()
        for record in journal.records():
            names.add(record.name)
            if record.kind == "tags":
                tables = record.payload.get(TABLES_TAG, tables)
            for key, _, at_ms, step in record.payload if record.kind == "metrics" else ():
                self._clock.after(at_ms)
                self._recorded_steps[key] = max(step, self._recorded_steps.get(key, step))
        self._tables = tables
        if "continues" in self.tags and not self._resumed:  # the new run has not all of them
            self._tables = self.tags[TABLES_TAG] = only_tables(tables, names)

    @property
    def name(self) -> str | None:
        """Lightning's name of a logger: the experiment's id, as its own MLflow logger has it."""
        return self._experiment_id

    @property
    def version(self) -> str | None:
        return self._run_id

    @property
    def run_id(self) -> str | None:
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        return self._experiment_id

    @property
    def is_resumed(self) -> bool:
        return self._resumed

    @property
    def recorded_steps(self) -> Mapping[str, int]:
        """The last step of each metric that earlier processes of this run recorded."""
        return self._recorded_steps

    def skip_recorded(self) -> None:
        """From now on leave out every metric at a step that an earlier process recorded.

        For a resumed run that computes the same values again, from its last checkpoint up to
        where it was interrupted.
        """
        self._skip_up_to = self._recorded_steps

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Values at one step. Infinite ones are recorded as nan, with a note for each key.

        (MLflow's SQL store would turn inf into 1.8e308, which reads as a number.)
        """
        items = []
        at_ms = self._clock.now_ms()
        for name, value in metrics.items():
            key = re.sub(r"[^\w/. :-]", "_", name)
            if (step or 0) <= self._skip_up_to.get(key, -1):
                continue
            number = float(value)
            if math.isinf(number):
                if name not in self._nonfinite:
                    self._nonfinite.add(name)
                    self._note(f"tracking: {name} is {number} at step {step}; recorded as nan")
                number = math.nan
            items.append((key, number, at_ms, step or 0))
        if items:
            self._submit(Record("metrics", items))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the resolved config is recorded once, by `log_config`."""

    def log_config(self, config_yaml: str, flat_params: Mapping[str, Any]) -> None:
        """The resolved config as the artifact config.yaml, and as params of a new run.

        MLflow's params are immutable, so a resumed run keeps those it began with; what it was
        resumed with is the artifact config_resumed.yaml.
        """
        if self._resumed:
            self.log_text(config_yaml, "config_resumed.yaml")
            return
        self._submit(Record("params", {key: str(value) for key, value in flat_params.items()}))
        self.log_text(config_yaml, "config.yaml")

    def log_table(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """Rows as an MLflow table, as `samples/iteration_0010.json`; a same name replaces it."""
        self.log_text(table_json(rows), name)
        self._tables = with_table(self._tables, name)
        self.set_tags({TABLES_TAG: self._tables})

    def log_text(self, text: str, name: str) -> None:
        self._submit(Record("text", text, name))

    def log_figure(self, figure: Figure, name: str) -> None:
        """Drawn now, in the format of the name's suffix (png, svg, pdf), sent later."""
        if self._delivery is None:
            return
        buffer = io.BytesIO()
        figure.savefig(buffer, format=Path(name).suffix[1:] or "png", bbox_inches="tight")
        self._submit(Record("bytes", buffer.getvalue(), name))

    def log_artifact(self, path: str | Path, folder: str = "") -> None:
        """A local file. Without a journal it is read when it is sent: leave it in place."""
        self._submit(Record("file", str(path), folder))

    def log_inputs(self, inputs: Sequence[InputData]) -> None:
        """The data sets that the run reads, as MLflow's dataset inputs; once, on a new run."""
        if not self._resumed:
            self._submit(Record("inputs", list(inputs)))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._submit(Record("tags", {key: str(value) for key, value in tags.items()}))

    def finalize(self, status: str = "success") -> None:
        """Lightning's end of a fit or a validation: wait for delivery; the run stays open."""
        if self._delivery is not None and self._report is None:
            self._delivery.flush(_FLUSH_S)

    def sync(self) -> None:
        """What was logged so far outlives a power cut, in the journal."""
        if self._delivery is not None and self._report is None:
            self._delivery.sync()

    def close(self, status: RunStatus = "FINISHED") -> int:
        """Deliver the rest and end the run; the number of records that were not delivered."""
        if self._delivery is None:
            return 0
        if self._report is None:
            atexit.unregister(self.close)
            self._submit(Record("status", (status, self._clock.now_ms())))
            self._report = self._delivery.close()
            self._journal.close()
            for line in what_was_not_sent(self._report, self._journal.folder, self.store):
                self._note(line)
        return self._report.undelivered

    def discard_journal(self) -> None:
        """For a run that nothing resumes: remove the journal, unless there is something in it."""
        report, folder = self._report, self._journal.folder
        if folder and report and not report.undelivered and not report.refused:
            shutil.rmtree(folder, ignore_errors=True)

    def describe(self) -> str:
        """Where the run is recorded, for the summary."""
        return (
            f"MLflow run {self._run_id}, experiment '{self._experiment_name}', "
            f"{self.store.database or self.store.shown_uri}"
        )

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            self.close("FINISHED")
        else:
            self.close("FAILED" if issubclass(exc_type, Exception) else "KILLED")

    def _submit(self, record: Record) -> None:
        if self._delivery is not None:
            self._delivery.submit(record)
