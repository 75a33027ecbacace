"""What the end of a run says about records that no store has."""

from __future__ import annotations

from pathlib import Path

from vapo.config.secret_variables import TRACKING_PASSWORD, TRACKING_URI, TRACKING_USER
from vapo.tracking.credentials import Address
from vapo.tracking.delivery import DeliveryReport


def what_was_not_sent(report: DeliveryReport, folder: Path | None, store: Address) -> list[str]:
    """Lines for the user at the end of a run; none if the store has everything.

    The store's credentials come from the environment then, because nothing keeps them.
    """
    lines = []
    lost, num_left = report.lost, report.undelivered
    if num_left:
        total = report.delivered + num_left + report.refused
        what = "are kept; send them with"
        if lost:
            what = "are lost" if lost == num_left else f"{lost} of them are lost"
            if folder is not None:
                what += f": {folder} cannot be written, or was deleted or moved"
            what += "" if lost == num_left else "; send the others with"
        lines.append(
            f"tracking: {num_left} of {total} records were not delivered to {store.shown_uri} "
            f"(last error: {report.last_error}) and {what}"
        )
    if num_left > lost and folder is not None:
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
