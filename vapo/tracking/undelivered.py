"""What a store did not take, as lines for the user at the end of a run."""

from __future__ import annotations

from pathlib import Path

from vapo.config.credentials import TRACKING_PASSWORD, TRACKING_URI, TRACKING_USER
from vapo.tracking.delivery import DeliveryReport
from vapo.tracking.stores import Store


def what_was_not_sent(report: DeliveryReport, folder: Path | None, store: Store) -> list[str]:
    """Lines for the user at the end of a run; none if the store has everything.

    The store's credentials come from the environment then, because nothing keeps them.
    """
    lines = []
    if report.undelivered:
        total = report.delivered + report.undelivered + report.refused
        line = (
            f"tracking: {report.undelivered} of {total} records were not delivered to "
            f"{store.shown_uri} (last error: {report.last_error})"
        )
        if report.lost:
            line += f"; {report.lost} are lost"
            line += f": {folder} cannot be written, or was deleted or moved" if folder else ""
        lines.append(line)
    if report.undelivered > report.lost and folder is not None:
        lines[0] += "; send what is kept with"
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
