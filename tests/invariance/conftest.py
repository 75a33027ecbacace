"""One pair of ranks for the room: what they load and plan at first, they have for every test."""

from collections.abc import Iterator

import pytest

from tests.forked import Ranks


@pytest.fixture(scope="package")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks
