"""Whole runs are not checked call by call: the tests of their parts check types and shapes."""

from collections.abc import Generator
from pathlib import Path

import jaxtyping
import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Pytest calls it for the tests of other folders, too."""
    jaxtyping.config.update("jaxtyping_disable", HERE in item.path.parents)
    try:
        return (yield)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
