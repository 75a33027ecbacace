"""One uninterrupted run and one tracking store for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import runs
from tests.tracking.ready_stores import ready_store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ready_store(tmp_path_factory.mktemp("store") / "mlruns")


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """The folder of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    code = runs.fit(folder / "log.txt", *runs.where(folder, store))
    assert code == 0, (folder / "log.txt").read_text()[-3000:]
    return folder
