"""What tests that import a user's modules share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from vapo.user_code import user_functions


@pytest.fixture
def imports_are_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore Python's path after a test, and forget the modules `mine_...` that it imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(user_functions, "_appended_folders", [])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("mine_"):
            del sys.modules[name]
