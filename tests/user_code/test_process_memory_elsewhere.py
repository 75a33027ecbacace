"""A system other than Linux has no /proc: nothing of a process's memory is overwritten there."""

from __future__ import annotations

import ctypes
import sys

import pytest

from vapo.user_code.process_memory import overwrite_secrets


def test_elsewhere_than_on_linux_nothing_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of /proc/self/stat mean nothing there: a write to them would end the process."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "string_at", None)
    monkeypatch.setattr(ctypes, "memset", None)
    overwrite_secrets()
