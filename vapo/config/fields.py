"""How the config's fields are declared: a default, its help text, and its range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, TypeVar

T = TypeVar("T")


def option(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    owns: Sequence[str] = (),
    alike: Sequence[str] = (),
) -> Any:
    """A config field: its default, its help text, and the range that validation enforces.

    Args:
        owns: fields beside it that mean something under its value only: a layer that changes the
            value begins with their defaults, not with what was set for the other value.
        alike: values between which they keep their meaning.
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    metadata = {
        "doc": doc,
        "bounds": {k: v for k, v in bounds.items() if v is not None},
        "owns": tuple(owns),
        "alike": tuple(alike),
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(factory: Callable[[], T], doc: str) -> T:
    """A nested block of the config."""
    return field(default_factory=factory, metadata={"doc": doc})
