"""The benchmarks are scripts beside each other: here their folder is on the path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "experiments/bench"


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
