"""Reads the tables of docs/metrics.md."""

import re
from collections.abc import Mapping
from pathlib import Path

from vapo.tracking.metric_groups import documented_key

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented_rows(page: str | None = None) -> dict[str, list[str]]:
    """Key -> [estimator, unit, reduction] of every table row.

    Raises: ValueError for a row without four cells, and for a key that has two rows.
    """
    rows: dict[str, list[str]] = {}
    for line in (METRICS_PAGE.read_text() if page is None else page).splitlines():
        match = re.match(r"\| *`([^`]+)` *\|(.*)\|$", line)
        if not match:
            continue
        cells = [cell.strip() for cell in match[2].split("|")]
        if len(cells) != 3 or not all(cells):
            raise ValueError(f"{match[1]}: not three cells after the key: {cells}")
        if match[1] in rows:
            raise ValueError(f"{match[1]} has two rows")
        rows[match[1]] = cells
    return rows


def documented_keys() -> set[str]:
    return set(documented_rows())


def documented(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a recorded run, by their keys in docs/metrics.md."""
    return {documented_key(key): value for key, value in metrics.items()}
