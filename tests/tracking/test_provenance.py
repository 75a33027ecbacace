"""Which commit a run says it ran on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.config.fits import ROOT
from vapo.tracking.provenance import git_state


def test_outside_a_checkout_the_commit_is_that_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VAPO_COMMIT", raising=False)
    assert git_state(tmp_path) == {}
    monkeypatch.setenv("VAPO_COMMIT", "abc123\n")
    assert git_state(tmp_path) == {"git/commit": "abc123", "mlflow.source.git.commit": "abc123"}
    monkeypatch.setenv("VAPO_COMMIT", "")
    assert git_state(tmp_path) == {}


def test_in_a_checkout_it_is_the_checkouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAPO_COMMIT", "abc123")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert git_state(ROOT)["git/commit"] == head.stdout.strip() != "abc123"
