"""`vapo deliver`: send the records of runs whose tracking store was away."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from vapo.config.credentials import without_credentials
from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.tracking.delivery import Delivery
from vapo.tracking.journal import Journal, JournalInUseError
from vapo.tracking.journal_folders import JOURNAL_NAME, read_target
from vapo.tracking.known_stores import check_known, remember_store
from vapo.tracking.opening import client_of
from vapo.tracking.sink import MlflowSink
from vapo.tracking.stores import locate_store

_JOURNAL = re.compile(r"tracking(-[0-9A-Za-z_-]{12})?")


def run(run_dirs: Sequence[Path], *, tracking_uri: str | None, only_list: bool) -> None:
    """Send the tracking records that wait in the runs' folders to MLflow; then they wait no more.

    Args:
        tracking_uri: the store to send to; None: the store that each run's record names.
        only_list: print what waits, and send nothing.

    Raises: UserError: a store does not answer, or records are still left at the end.
    """
    folders, num_left = list[Path](), 0
    for run_dir in map(Path.absolute, run_dirs):
        journals = [run_dir] if (run_dir / JOURNAL_NAME).is_file() else journals_in(run_dir)
        if not journals:
            reason = "has no records waiting" if run_dir.is_dir() else "is not a folder"
            raise UserError(
                f"{run_dir} {reason}: give the folder of a run, as the last line of `vapo fit` "
                "names it"
            )
        folders += journals
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


def journals_in(run_dir: Path) -> list[Path]:
    """Return the folders of waiting records in a run's folder.

    They are the run's own, and those that another run has set aside there.

    Raises: UserError: one of them is a link.
    """
    paths = run_dir.iterdir() if run_dir.is_dir() else ()
    folders = sorted(path for path in paths if _JOURNAL.fullmatch(path.name))
    for path in folders:
        if path.is_symlink():
            raise UserError(f"{path} is a link to {path.readlink()}: give the folder of that run")
    return [path for path in folders if (path / JOURNAL_NAME).is_file()]


def _deliver(folder: Path, journal: Journal, tracking_uri: str | None, only_list: bool) -> int:
    """Send the waiting records of one folder, or only print them. Return how many are left."""
    target = read_target(folder)
    if target is None:
        raise UserError(
            f"{folder}: no readable target.json, so the run of these records is unknown"
        )
    uri, run_id = tracking_uri or target["tracking_uri"], target["mlflow_run_id"]
    if not only_list and tracking_uri is None and journal:
        check_known(uri, named_by=folder, how="--tracking_uri ", run_id=run_id)
    kinds = Counter(record.kind if record else "damaged" for record in journal.waiting())
    contents = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    contents = f"{len(journal)} records ({contents})" if journal else "nothing"
    say(f"{folder}: {contents} to send to {without_credentials(uri)}")
    if only_list:
        return len(journal)
    if not journal:
        return 0
    store = locate_store(uri)
    client = client_of(store, run_id)
    remember_store(store)
    sink = MlflowSink(client, run_id)
    missing = sink.missing if store.is_http else None
    delivery = Delivery(sink, lambda _: None, journal, redact=store.redact, missing=missing)
    report = delivery.close(while_it_moves=True)
    say(f"  run {run_id}: {report.delivered} sent", end="")
    say(f", {report.refused} refused (see {folder}/refused.jsonl)" if report.refused else "")
    if report.missing_files:
        say(f"  it does not have artifacts that it took: {', '.join(report.missing_files)}")
    if report.undelivered:
        say(f"  {report.undelivered} not sent: {report.last_error}")
    return report.undelivered
