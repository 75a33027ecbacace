"""Reads the tables of docs/metrics.md."""

import re
from pathlib import Path

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented_rows(page: str | None = None) -> dict[str, list[str]]:
    """Key -> [estimator, unit, reduction] of every table row, which may be several keys'.

    Raises: ValueError for a row without four cells, and for a key that has two rows.
    """
    rows: dict[str, list[str]] = {}
    for line in (METRICS_PAGE.read_text() if page is None else page).splitlines():
        match = re.match(r"\| *(`[^`]+`(?:, `[^`]+`)*) *\|(.*)\|$", line)
        if not match:
            continue
        cells = [cell.strip() for cell in match[2].split("|")]
        if len(cells) != 3 or not all(cells):
            raise ValueError(f"{match[1]}: not three cells after the key: {cells}")
        for key in re.findall(r"`([^`]+)`", match[1]):
            if key in rows:
                raise ValueError(f"{key} has two rows")
            rows[key] = cells
    return rows


def documented_keys() -> set[str]:
    return set(documented_rows())
