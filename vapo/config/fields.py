"""How the config's fields are declared: a default, its help text, and its range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, TypeVar

_T = TypeVar("_T")


def option(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """A config field: its default, its help text, and the range that validation enforces."""
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    metadata = {"doc": doc, "bounds": {k: v for k, v in bounds.items() if v is not None}}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def choice(default: str | None, doc: str, **options: type) -> Any:
    """A field whose value decides which other keys its block has (see `config.kinds`).

    Args:
        options: for each value that has keys of its own, the dataclass of them. A layer that
            changes the value begins with the new kind's defaults, except for the keys that both
            kinds inherit from one class.
    """
    return field(default=default, metadata={"doc": doc, "bounds": {}, "kinds": options})


def section(factory: Callable[[], _T], doc: str) -> _T:
    """A nested block of the config."""
    return field(default_factory=factory, metadata={"doc": doc})


def not_a_key(factory: Callable[[], _T]) -> _T:
    """A field that neither a file nor an override sets, and that makes no two configs different."""
    metadata = {"omegaconf_ignore": True}
    return field(default_factory=factory, repr=False, compare=False, metadata=metadata)


FOLDER_DOC = (
    "folder in which that function is looked for before the current one; null: the folder of the "
    "YAML file where the key is written, which a recorded config then has here"
)


def is_function_folder(key: str) -> bool:
    """Whether a key, dotted or not, says where a function is looked for."""
    return key.endswith("function_folder")
