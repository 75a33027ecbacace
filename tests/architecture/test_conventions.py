"""Conventions that a reader relies on, proved over the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "vapo"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def test_no_grab_bag_files() -> None:
    names = {"utils.py", "util.py", "base.py", "helpers.py", "common.py", "misc.py"}
    assert not [path for path in SOURCES if path.name in names]


def test_only_resolve_reads_enabled() -> None:
    readers = {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        for node in nodes(path)
        if (isinstance(node, ast.Attribute) and node.attr == "enabled")
        or (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") == "getattr"
            and any(isinstance(a, ast.Constant) and a.value == "enabled" for a in node.args)
        )
    }
    assert readers == {"config/components.py"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_runs_foreign_code(path: Path) -> None:
    for node in nodes(path):
        if isinstance(node, ast.Call):
            assert getattr(node.func, "id", "") not in ("eval", "exec", "compile", "__import__")
            for keyword in node.keywords:
                if keyword.arg == "trust_remote_code":
                    assert getattr(keyword.value, "value", None) is False
                if keyword.arg == "weights_only":
                    assert getattr(keyword.value, "value", None) is True
                if keyword.arg == "shell":
                    assert getattr(keyword.value, "value", None) is False
        elif isinstance(node, ast.Import):
            assert not {a.name.split(".")[0] for a in node.names} & {"pickle", "dill", "joblib"}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in ("pickle", "dill", "joblib")


def test_losses_have_no_denominator_of_their_own() -> None:
    """A `.mean()` in a loss would weigh micro-batches wrongly; denominators are passed in."""
    for node in nodes(PACKAGE / "functional" / "losses.py"):
        assert not (isinstance(node, ast.Attribute) and node.attr == "mean"), node.lineno
