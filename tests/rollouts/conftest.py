"""A rollout server over a double of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rollouts.serving import FakeEngine, serving
from vapo.rollouts.engines.server import EngineServer


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[EngineServer]:
    with serving(engine) as server:
        yield server
