"""Whole runs are not checked call by call: the tests of their parts check types and shapes."""

from collections.abc import Generator

import jaxtyping
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        return (yield)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
