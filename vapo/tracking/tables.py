"""Tables as MLflow's UI and `load_table` read them: a JSON artifact, and a tag that lists all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

TABLES_TAG = "mlflow.loggedArtifacts"
_MAX_TAG_CHARS = 7500


def table_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """The artifact: all columns of all rows, in the order in which they come."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    data = [[_json_value(row.get(column)) for column in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data}, default=str)


def with_table(listed: str, name: str) -> str:
    """The tag's value with this table as the last one.

    It is bounded: the oldest tables drop out of it, and stay readable as artifacts.
    """
    entry = {"path": name, "type": "table"}
    tables = [*(table for table in json.loads(listed) if table != entry), entry]
    while len(json.dumps(tables)) > _MAX_TAG_CHARS:
        del tables[0]
    return json.dumps(tables)


def _json_value(value: Any) -> Any:
    """JSON has no nan and no inf, and readers reject them: null, as pandas writes."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
