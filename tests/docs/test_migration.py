"""The page for users of verl and TRL: made from its rows, whose keys of ours exist."""

from __future__ import annotations

from collections import Counter

import pytest

from docs.hooks.migration import PAGE, Row, page, sections
from vapo.config import FitConfig
from vapo.config.foreign_names import FOREIGN_NAMES, meant_key
from vapo.config.options import Option, describe

ENTRIES = describe(FitConfig)
ROWS = [row for section in sections() for row in section.rows]
PPO = "PPOConfig."


def test_the_page_is_made_from_the_rows() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m docs.hooks.migration`"


def test_there_are_rows_enough_and_none_twice() -> None:
    assert len(ROWS) >= 60
    assert sum(bool(row.verl) for row in ROWS) >= 60
    assert sum(bool(row.trl) for row in ROWS) >= 50
    for keys in ([k for row in ROWS for k in row.verl], [k for row in ROWS for k in row.trl]):
        assert max(Counter(keys).values()) == 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: (*row.verl, *row.trl)[0])
def test_a_row_is_whole(row: Row) -> None:
    """A key of theirs, what differs in a sentence, and ours as the schema has them."""
    assert row.verl or row.trl
    assert row.difference.endswith(".")
    assert "|" not in row.difference
    for text in (*row.verl, *row.trl):
        assert text == text.strip()
        assert " " not in text
    for text in row.here:
        key, has_value, value = text.partition("=")
        option = ENTRIES.get(key)
        assert isinstance(option, Option), key
        assert not has_value or value in option.label.split("|"), text


@pytest.mark.parametrize("row", ROWS, ids=lambda row: (*row.verl, *row.trl)[0])
def test_the_error_of_a_typed_key_says_what_the_page_says(row: Row) -> None:
    ours = {text.partition("=")[0] for text in row.here}
    for name in (*row.verl, *(key.removeprefix(PPO) for key in row.trl)):
        parts = name.split(".")
        if any(".".join(parts[i:]) in FOREIGN_NAMES for i in range(len(parts))):
            assert meant_key(name, ENTRIES) in ours, name


def test_most_keys_have_such_an_error() -> None:
    """So the page may say that it is so for most."""
    named = [
        any(".".join(parts[i:]) in FOREIGN_NAMES for i in range(len(parts)))
        for row in ROWS
        if row.here
        for name in (*row.verl, *row.trl)
        for parts in [name.removeprefix(PPO).split(".")]
    ]
    assert sum(named) / len(named) > 0.5
