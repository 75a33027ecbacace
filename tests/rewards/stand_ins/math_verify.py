"""A stand-in for the package math-verify: what the adapter calls, with what it hands over."""

from __future__ import annotations

import time


def parse(text: str, parsing_timeout: int | None = 5) -> list[str]:
    """The content of the last box, twice, as the package gives an expression and its text."""
    assert parsing_timeout is None, "its time limit uses signals"
    if "hang" in text:
        time.sleep(600)
    if "open a file" in text:
        open("written", "w").close()
    if "evaluate" in text:
        eval("__import__('os').getpid()")
    _, box, content = text.rpartition(r"\boxed{")
    return [content.partition("}")[0]] * 2 if box else []


def verify(gold: list[str], target: list[str], timeout_seconds: int | None = 5) -> bool:
    assert timeout_seconds is None, "its time limit uses signals"
    return gold == target
