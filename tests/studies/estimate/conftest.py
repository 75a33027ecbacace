"""The model that most tests of estimates measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.studies.estimate.memory_measurement import LAYERS, save_mid_size_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mid") / "model"
    return save_mid_size_model(path, num_hidden_layers=LAYERS)
