"""Files of rollouts for tests, and what is read of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo.studies.inspection.reading import ResponseReader
from vapo.studies.inspection.responses import BadRow, InspectedResponse

FIXTURES = Path(__file__).parent / "fixtures"


def read(source: Any, **options: Any) -> tuple[list[InspectedResponse], list[BadRow], str]:
    """The responses, the rows that could not be read, and all notes."""
    reader = ResponseReader(source, **options)
    found = list(reader)
    good = [one for one in found if isinstance(one, InspectedResponse)]
    bad = [one for one in found if isinstance(one, BadRow)]
    return good, bad, "\n".join(reader.notes)


def lines(path: Path, rows: Sequence[Mapping[str, Any] | str]) -> Path:
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(texts) + "\n")
    return path
