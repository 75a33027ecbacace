"""`vapo deliver`: send the records of runs whose tracking store was away."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vapo.config.uris import without_credentials
from vapo.errors import UserError
from vapo.tracking.journal import JournalInUseError
from vapo.tracking.run_journals import deliver, journals_in, tidy, what_is_left


def run(run_dirs: Sequence[Path], *, tracking_uri: str | None, only_list: bool) -> None:
    """Send what is left in each run's folder; a second time there is nothing left to send.

    Raises: UserError if a store does not answer, or records are still left at the end.
    """
    journals = [folder for run_dir in run_dirs for folder in journals_in(run_dir.absolute())]
    num_left = 0
    for folder in journals:
        try:
            left = what_is_left(folder)
        except JournalInUseError as error:
            if not only_list:
                raise
            print(error)
            continue
        shown = without_credentials(tracking_uri or left.tracking_uri)
        print(f"{folder}: {left.describe()} to send to {shown}")
        if not only_list and not left.num_records:
            tidy(left, tracking_uri)
        if only_list or not left.num_records:
            continue
        report = deliver(left, tracking_uri)
        print(f"  run {left.run_id}: {report.delivered} sent", end="")
        print(f", {report.refused} refused (see {folder}/refused.jsonl)" if report.refused else "")
        if report.undelivered:
            print(f"  {report.undelivered} not sent: {report.last_error}")
        num_left += report.undelivered
    if num_left:
        raise UserError(f"{num_left} records were not delivered; run `vapo deliver` again later")
