"""Journals of runs: which run and store one belongs to, what is in it, sending what is left."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vapo.config.secret_variables import TRACKING_PASSWORD, TRACKING_URI, TRACKING_USER
from vapo.errors import UserError
from vapo.tracking.delivery import Delivery, DeliveryReport
from vapo.tracking.journal import JOURNAL_NAME, Journal
from vapo.tracking.partial_uploads import remove_partial_uploads
from vapo.tracking.records import Clock
from vapo.tracking.stores import MlflowSink, Store, client_of, locate_store

FOLDER_NAME = "tracking"
_TARGET = "target.json"


@dataclass
class Recorded:
    """What the processes before this one wrote: each metric's last step, each tag's value."""

    steps: Mapping[str, int] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


def recorded_so_far(journal: Journal, clock: Clock) -> Recorded:
    """Sets the clock behind the journal's times, too: this host's may have gone back."""
    steps: dict[str, int] = {}
    tags: dict[str, str] = {}
    for record in journal.records():
        clock.after([record])
        if record.kind == "metrics":
            for key, _, _, step in record.payload:
                steps[key] = max(step, steps.get(key, step))
        elif record.kind == "tags":
            tags.update(record.payload)
    return Recorded(steps, tags)


def bind(journal: Journal, store: Store, run_id: str) -> None:
    """Note whose records these are; without the store's password."""
    if journal.folder is not None:
        target = {"tracking_uri": store.shown_uri, "mlflow_run_id": run_id}
        (journal.folder / _TARGET).write_text(json.dumps(target) + "\n")


def take_over(
    journal: Journal,
    store: Store,
    run_id: str,
    earlier: str | None,
    note: Callable[[str], None],
) -> None:
    """The journal is the run's from now on; `earlier` is the run that it was, None if it is new.

    Where that is another run, because the store has lost it, all its records are to be sent
    again, but for what the process that continues says by itself: params, inputs, the status.

    Raises: UserError if the journal cannot be written.
    """
    is_resumed = earlier == run_id
    try:
        if earlier and not is_resumed:
            journal.start_over(without=("params", "inputs", "status"))
            note(
                f"tracking: the run {earlier} is not in {store.shown_uri} any more; it is "
                f"continued in the new run {run_id}, which gets the {len(journal)} records of its "
                "history that are still in the run's folder"
            )
        elif journal:
            note(f"tracking: {len(journal)} records of the interrupted run are sent now")
        bind(journal, store, run_id)
    except OSError as error:
        raise UserError(
            f"cannot write the run's records in {journal.folder}: {error.strerror}; make room, "
            "or choose another output_dir or export_dir"
        ) from None
    has_it_alone = is_resumed and journal.folder is not None
    remove_partial_uploads(store, run_id if has_it_alone else None)


def set_aside_others(folder: Path, run_id: str | None, note: Callable[[str], None]) -> None:
    """Another run's journal in this folder keeps its records under another name."""
    target = _read_target(folder)
    if target is None or target.get("mlflow_run_id") == run_id:
        return
    other = folder.with_name(f"{folder.name}-{str(target.get('mlflow_run_id'))[:12]}")
    if not other.exists():
        folder.rename(other)
        note(f"tracking: the records of an earlier run in {folder} are now in {other}")


def what_was_not_sent(report: DeliveryReport, folder: Path | None, store: Store) -> list[str]:
    """Lines for the user at the end of a run; none if the store has everything.

    The store's credentials come from the environment then, because nothing keeps them.
    """
    lines = []
    if report.undelivered:
        total = report.delivered + report.undelivered + report.refused
        lines.append(
            f"tracking: {report.undelivered} of {total} records were not delivered to "
            f"{store.shown_uri} (last error: {report.last_error}) "
            + _where_they_are(report, folder)
        )
    if report.undelivered > report.lost and folder is not None:
        command = f"  vapo deliver {folder.parent}"
        if store.parts.has_credentials:
            names = f"{TRACKING_USER} and {TRACKING_PASSWORD}" if store.is_http else TRACKING_URI
            command += f"  # with the store's credentials in {names}"
        lines.append(command)
    if report.refused:
        kept = folder / "refused.jsonl" if folder is not None else None
        where = f"; see {kept}" if kept is not None and kept.is_file() else ""
        lines.append(f"tracking: {store.shown_uri} refused {report.refused} records{where}")
    return lines


def _where_they_are(report: DeliveryReport, folder: Path | None) -> str:
    if folder is None:
        return "and are lost"
    why = f"{folder} cannot be written, or was deleted or moved"
    if report.lost == report.undelivered:
        return f"and are lost: {why}"
    if report.lost:
        return f"and {report.lost} of them are lost: {why}; send the others with"
    return "and are kept; send them with"


@dataclass(frozen=True)
class Left:
    """A journal with what was not sent. `kinds`: how many records of each kind."""

    folder: Path
    run_id: str
    tracking_uri: str
    kinds: Mapping[str, int]

    @property
    def num_records(self) -> int:
        return sum(self.kinds.values())

    def describe(self) -> str:
        what = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        return f"{self.num_records} records ({what})" if what else "nothing"


def journals_in(run_dir: Path) -> list[Path]:
    """The journals of a run's folder, or the folder itself if it is one.

    Raises: UserError if there is none.
    """
    if (run_dir / JOURNAL_NAME).is_file():
        return [run_dir]
    found = sorted(path.parent for path in run_dir.glob(f"{FOLDER_NAME}*/{JOURNAL_NAME}"))
    if not found:
        what = "has no records waiting" if run_dir.is_dir() else "is no folder"
        raise UserError(
            f"{run_dir} {what}: give the folder of a run, as the last line of `vapo fit` names it"
        )
    return found


def what_is_left(folder: Path) -> Left:
    """Raises: UserError if a run is still writing there, or the folder does not say whose."""
    target = _read_target(folder)
    if target is None:
        raise UserError(f"{folder}: no readable {_TARGET}, so the run of these records is unknown")
    journal = Journal(folder)
    try:
        kinds = Counter[str](record.kind for record in journal.records(unsent=True))
    finally:
        journal.close()
    return Left(folder, target["mlflow_run_id"], target["tracking_uri"], kinds)


def tidy(left: Left, tracking_uri: str | None) -> None:
    """Remove what a killed process left among the artifacts of a run that has nothing to send."""
    with closing(Journal(left.folder)):  # no other process writes to the run
        remove_partial_uploads(locate_store(tracking_uri or left.tracking_uri), left.run_id)


def deliver(left: Left, tracking_uri: str | None) -> DeliveryReport:
    """Send what is left, in order. Raises: UserError if the store does not answer."""
    store = locate_store(tracking_uri or left.tracking_uri)
    journal = Journal(left.folder)
    try:
        sink = MlflowSink(client_of(store, left.run_id), left.run_id)
        remove_partial_uploads(store, left.run_id)
        # the report has it all
        delivery = Delivery(sink, lambda text: None, journal, redact=store.redact)
        return delivery.close(while_it_moves=True)
    finally:
        journal.close()


def _read_target(folder: Path) -> dict[str, Any] | None:
    try:
        target = json.loads((folder / _TARGET).read_text())
    except (OSError, ValueError):
        return None
    return target if isinstance(target, dict) and "tracking_uri" in target else None
