"""Make the fields of a config, and blocks whose options depend on a kind that one key names.

A field made by `choice` names a dataclass for each of its values. The type of a finished block is
the block's own class together with the classes of the kinds that were chosen, so
`isinstance(source, FileSource)` says what it is, and an option of another kind is not there.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cache, partial
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


def option(default: Any, doc: str, **bounds: float) -> Any:
    """Make a config field: its default, its help text, and the range that validation enforces.

    The range is given as `ge` or `gt`, then `le` or `lt`.
    """
    metadata = {"doc": doc, "bounds": bounds}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def choice(default: str | None, doc: str, **options: type) -> Any:
    """Make a config field whose value, a kind, decides which other keys its block has.

    Args:
        options: for each value that has keys of its own, the dataclass of them. A layer that
            changes the value begins with the new kind's defaults, except for the keys that both
            kinds inherit from one class.
    """
    return field(default=default, metadata={"doc": doc, "bounds": {}, "kinds": options})


def section(factory: Callable[[], _T], doc: str) -> _T:
    """Make a config field that holds a block of keys.

    If `factory` is a class, the block has the options of its default kinds, too.
    """
    default_factory = partial(make, factory) if isinstance(factory, type) else factory
    return field(default_factory=default_factory, metadata={"doc": doc})


def not_a_key(factory: Callable[[], _T]) -> _T:
    """Make a field of a config that no file or override sets, and that comparisons ignore."""
    metadata = {"is_key": False}
    return field(default_factory=factory, repr=False, compare=False, metadata=metadata)


FOLDER_DOC = (
    "folder in which that function is looked for before the current one; null: the folder of the "
    "YAML file where the key is written, which a recorded config then has here"
)


def is_function_folder(key: str) -> bool:
    """Whether a key, dotted or not, names the folder in which a function is looked for."""
    return key.endswith("function_folder")


def make(block: type, **values: Any) -> Any:
    """Return an instance of a block's class that has the options of its kinds.

    Loading a config makes blocks in this way, too. The instance's type has the block's class and
    the classes of its kinds as bases, so `isinstance` narrows it.

    Raises: TypeError: an option that the kinds do not have.
    """
    block_type: type[Any] = own_type(block, values)
    return block_type(**values)


def kinds_of(block: type) -> Mapping[str, Mapping[Any, type]]:
    """Return, for each key of the block that names a kind, the options' class of each kind."""
    fields = dataclasses.fields(block)
    return {f.name: f.metadata["kinds"] for f in fields if "kinds" in f.metadata}


def own_type(block: type[_T], values: Mapping[str, Any]) -> type[_T]:
    """Return the block's class joined with the classes of the kinds that `values` names.

    For a kind that is unset or unknown, the default kind is taken.
    """
    kinds_or_none: list[type | None] = []
    for name, options in kinds_of(block).items():
        value, default = values.get(name), getattr(block, name)
        is_known = isinstance(value, str) and value in _names(hints_of(block)[name])  # type: ignore[arg-type]
        kinds_or_none.append(options.get(value if is_known else default))
    kinds = tuple(kind for kind in kinds_or_none if kind is not None)
    return _composed(block, kinds)  # type: ignore[arg-type]


@cache
def _names(hint: Any) -> frozenset[Any]:
    """Return the values of a `Literal` type, or of all `Literal` types in a union."""
    if get_origin(hint) is Literal:
        return frozenset(get_args(hint))
    return frozenset[Any]().union(*(_names(part) for part in get_args(hint)))


@cache
def _composed(block: type[_T], kinds: tuple[type, ...]) -> type[_T]:
    if not kinds:
        return block
    attributes = {
        "__module__": block.__module__,
        "__reduce__": lambda self: (_remade, (block, vars(self))),  # the type itself has no name
    }
    name = "".join(c.__name__ for c in (*kinds, block))
    return dataclasses.dataclass(
        types.new_class(name, (*kinds, block), {}, lambda n: n.update(attributes))
    )


def _remade(block: type, values: Mapping[str, Any]) -> Any:
    return make(block, **values)


def kind_options(block: Any, name: str) -> dict[str, Any]:
    """Return the kind that a block's key `name` has, and this kind's options, by key."""
    kind = kinds_of(type(block))[name].get(getattr(block, name))
    names = option_names(kind) if kind is not None and isinstance(block, kind) else ()
    return {n: getattr(block, n) for n in (name, *names)}


def option_names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def defining_class(kind: type | None, name: str) -> type | None:
    """Return the class that declares an option of a kind, or None.

    Two kinds share the option if they have this class in common.
    """
    classes = () if kind is None else kind.__mro__
    return next((c for c in classes if name in inspect.get_annotations(c)), None)


@cache
def hints_of(block: type) -> dict[str, Any]:
    return get_type_hints(block)


def split_null(hint: Any) -> tuple[Any, bool]:
    """Return a key's type without null, and whether it may be null.

    The type may be a union of a type and words, as `int | Literal["auto"]`.
    """
    if not is_union(hint):
        return hint, False
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    nullable = len(kinds) < len(get_args(hint))
    if len(kinds) == 1:
        return kinds[0], nullable
    num_words = sum(get_origin(kind) is Literal for kind in kinds)
    assert num_words == len(kinds) - 1, f"a key has one type, words and null: {hint}"
    return Union[tuple(kinds)], nullable  # noqa: UP007 (of a tuple)


def is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def types_in(kind: Any) -> tuple[Any, ...]:
    """Return the types that a key's value may have: the members of a union, or the type."""
    return get_args(kind) if is_union(kind) else (kind,)
