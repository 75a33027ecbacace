"""`vapo deliver`: send the records of runs whose tracking store was away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from vapo.config.credentials import without_credentials
from vapo.errors import UserError
from vapo.system.shown_text import say
from vapo.tracking.delivery import Delivery
from vapo.tracking.journal import JOURNAL_NAME, Journal, JournalInUseError, read_target
from vapo.tracking.opening import client_of
from vapo.tracking.sink import MlflowSink
from vapo.tracking.stores import locate_store


def run(run_dirs: Sequence[Path], *, tracking_uri: str | None, only_list: bool) -> None:
    """Send what is left in each run's folder; a second time there is nothing left to send.

    Raises: UserError if a store does not answer, or records are still left at the end.
    """
    folders, num_left = list[Path](), 0
    for run_dir in map(Path.absolute, run_dirs):
        found = sorted(path.parent for path in run_dir.glob(f"tracking*/{JOURNAL_NAME}"))
        if (run_dir / JOURNAL_NAME).is_file():  # it is a journal itself
            found = [run_dir]
        if not found:
            what = "has no records waiting" if run_dir.is_dir() else "is no folder"
            raise UserError(
                f"{run_dir} {what}: give the folder of a run, as the last line of `vapo fit` names "
                "it"
            )
        folders += found
    for folder in folders:
        try:
            with closing(Journal(folder)) as journal:
                num_left += _deliver(folder, journal, tracking_uri, only_list)
        except JournalInUseError as error:
            if not only_list:
                raise
            say(error)
    if num_left and not only_list:
        raise UserError(f"{num_left} records were not delivered; run `vapo deliver` again later")


def _deliver(folder: Path, journal: Journal, tracking_uri: str | None, only_list: bool) -> int:
    """How many records are left."""
    target = read_target(folder)
    if target is None:
        raise UserError(
            f"{folder}: no readable target.json, so the run of these records is unknown"
        )
    uri, run_id = tracking_uri or target["tracking_uri"], target["mlflow_run_id"]
    kinds = Counter(record.kind if record else "damaged" for record in journal.waiting())
    what = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    what = f"{len(journal)} records ({what})" if journal else "nothing"
    say(f"{folder}: {what} to send to {without_credentials(uri)}")
    if only_list:
        return len(journal)
    if not journal:
        return 0
    store = locate_store(uri)
    sink = MlflowSink(client_of(store, run_id), run_id)
    delivery = Delivery(sink, lambda _: None, journal, redact=store.redact)
    report = delivery.close(while_it_moves=True)
    say(f"  run {run_id}: {report.delivered} sent", end="")
    say(f", {report.refused} refused (see {folder}/refused.jsonl)" if report.refused else "")
    if report.undelivered:
        say(f"  {report.undelivered} not sent: {report.last_error}")
    return report.undelivered
