r"""The verifier of the package math-verify, which is common in the field.

It parses LaTeX into SymPy's expressions, and plain expressions by SymPy's parser, which evaluates
code: the process that it runs in refuses any but bounded arithmetic (`hostile_text`). Its own time
limits are signals that interrupt SymPy anywhere and leave its caches half written. They are off:
the time limit of a verdict ends the process instead.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from vapo.errors import UserError
from vapo.rewards.judgement import MAX_EXTRACTED_CHARS, Judgement, Verifier
from vapo.system.extras import install_command


def make_math_verify() -> Verifier:
    """Make the verifier; the package is imported with the first response.

    Raises: UserError: math-verify is not installed.
    """
    check_math_verify()

    @lru_cache(maxsize=1024)
    def parsed(reference: str) -> list[Any]:
        from math_verify import parse

        boxed = reference if r"\boxed" in reference else rf"\boxed{{{reference}}}"
        found: list[Any] = parse(boxed, parsing_timeout=None)
        return found

    def math_verify(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
        from math_verify import parse, verify

        gold = parsed(answer.strip())
        if not gold:
            raise ValueError(f"math-verify does not understand the reference {answer!r:.80}")
        found = parse(response_text, parsing_timeout=None)
        if not found:
            return Judgement(False)
        is_correct = bool(verify(gold, found, timeout_seconds=None))
        return Judgement(is_correct, extracted=str(found[-1])[:MAX_EXTRACTED_CHARS])

    return math_verify


def check_math_verify(key: str = "rewards.verifier") -> None:
    """Raises: UserError: math-verify is not installed."""
    if not _is_installed():
        raise UserError(
            f"{key} is math_verify, which is not installed: {install_command('math_verify')}"
        )


def _is_installed() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def import_package() -> None:
    """Import it, which takes seconds that no verdict's time limit is for."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the limits being off
    import math_verify  # noqa: F401
