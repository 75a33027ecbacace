"""The checkers that `tests/conftest.py` puts on every annotated function of `vapo`."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep3119Exception

# PEP 484: an int is good where a float is asked for.
TYPES = BeartypeConf(is_pep484_tower=True, claw_is_pep526=False)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its annotations enforced."""
    try:
        return beartype(conf=TYPES)(function)
    except BeartypeDecorHintPep3119Exception:
        return function  # asks for a Protocol that isinstance() cannot check
