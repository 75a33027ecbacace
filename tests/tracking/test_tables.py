"""Tables as MLflow reads them."""

from __future__ import annotations

import json
from typing import Any

from vapo.tracking.records import table_json, with_table


def test_columns_of_all_rows_and_null_for_what_json_lacks() -> None:
    rows: list[dict[str, Any]] = [{"a": 1, "b": float("nan")}, {"c": "x", "a": float("-inf")}]
    assert json.loads(table_json(rows)) == {
        "columns": ["a", "b", "c"],
        "data": [[1, None, None], [None, None, "x"]],
    }


def test_the_list_is_bounded_and_has_the_newest_once() -> None:
    """A store refuses a longer tag, and with it the record of the newest table."""
    listed = "[]"
    for number in [*range(500), 499]:
        listed = with_table(listed, f"samples/iteration_{number:04}.json")
    assert 7000 < len(listed) <= 7500
    paths = [entry["path"] for entry in json.loads(listed)]
    assert paths == [f"samples/iteration_{n:04}.json" for n in range(500 - len(paths), 500)]
