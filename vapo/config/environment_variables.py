"""Which values of a config the environment gives, and how the user wrote them.

A value is known by its place and by what it is: where another value was put in its place since,
it no longer counts as the environment's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from vapo.config.credentials import without_credentials
from vapo.config.sources import SOURCES
from vapo.errors.redactor import Redactor
from vapo.errors.secret_rule import is_secret_name

FIELD = "from_environment"
MARK = "\ue000{}\ue001"
MARKED = re.compile("\ue000(\\d+)\ue001")
REFERENCE = "\ue000\\d+\ue001"
_VARIABLE = re.compile(r"oc\.env\s*:\s*['\"]?([A-Za-z_]\w*)")

Place = tuple[str | int, ...]


@dataclass(frozen=True)
class EnvironmentValue:
    """A config value that comes from environment variables, in part or as a whole.

    `text` is what the user wrote, with `${oc.env:NAME}` unresolved. `source` is the same in
    OmegaConf's syntax, which escapes the text around interpolations. `names` are the variables, and
    `value` is the resolved value.
    """

    text: str
    source: str
    names: tuple[str, ...]
    value: Any = field(repr=False)

    @property
    def is_secret(self) -> bool:
        """Whether one of the variables is a secret by its name, as a password.

        A secret may change while a run stays the same run.
        """
        return any(map(is_secret_name, self.names))


@dataclass(frozen=True)
class FromEnvironment:
    """The values of a config that come from environment variables, by their places in it.

    A place is the tuple of keys and list indices that lead to a value.
    """

    values: Mapping[Place, EnvironmentValue] = field(default_factory=dict)

    def under(self, key: str) -> dict[Place, EnvironmentValue]:
        """Return the values from the environment whose keys are at or below a dotted key."""
        block = tuple(key.split("."))
        return {path: v for path, v in self.values.items() if path[: len(block)] == block}

    def taking(self, key: str, other: FromEnvironment) -> FromEnvironment:
        """Return these values as if the config's block `key` came from the config of `other`."""
        remaining_values = {
            path: v for path, v in self.values.items() if path not in self.under(key)
        }
        return FromEnvironment({**remaining_values, **other.under(key)})

    def text_of(self, value: str) -> str:
        """Return a value of the config as the user wrote it, with `${oc.env:NAME}` unresolved."""
        return next((v.text for v in self.values.values() if v.value == value), value)

    def identify(self, value: str | None) -> str | None:
        """Return a text that identifies a config value without showing a credential.

        A value from the environment is given as the user wrote it. A digest follows, unless it is
        secret, so that two values of a variable differ. Any other URI loses its credentials.
        """
        match = next((v for v in self.values.values() if v.value == value), None)
        if value is None or match is None:
            return value if value is None else without_credentials(value)
        digest = hashlib.sha256(value.encode()).hexdigest()[:12]
        return match.text if match.is_secret else f"{match.text} ({digest})"

    def redact(self, text: str) -> str:
        """Return the text with `${oc.env:NAME}` in place of each variable's value."""
        return Redactor(self.texts)(text)

    @property
    def texts(self) -> list[tuple[str, str]]:
        """Pairs of a variable's value and the `${oc.env:NAME}` that is shown in its place."""
        return texts_of_variables({name for value in self.values.values() for name in value.names})


def values_of(config: Any) -> dict[str, Any]:
    """Return the resolved values of a config or a block of one, as nested dicts.

    They may hold secrets: they are for use, and must not be written or shown.
    """
    tree = dataclasses.asdict(config)
    tree.pop(FIELD, None)
    tree.pop(SOURCES, None)
    return tree


def escape(text: str) -> str:
    """Escape each literal `${` in a resolved text, so that it is not read as an interpolation."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def variables_in(value: Any) -> set[str]:
    """Return the names of the variables in all `${oc.env:NAME}` of an unresolved value."""
    if isinstance(value, Mapping):
        return set().union(*map(variables_in, value.values()))
    if isinstance(value, (list, tuple)):
        return set().union(*map(variables_in, value))
    return set(_VARIABLE.findall(value)) if isinstance(value, str) else set()


def texts_of_variables(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of a variable's value and the `${oc.env:NAME}` that is shown in its place.

    Variables that are not set are left out.
    """
    return [(os.environ[name], f"${{oc.env:{name}}}") for name in names if name in os.environ]


def read_environment(tree: Mapping[str, Any], config: Any) -> FromEnvironment:
    """Return which values of a resolved config came from the environment.

    `tree` is the unresolved config. It is resolved once more with marks in place of the variables'
    values, so that a value which is taken from another key, or put together from several, is found
    as well.

    Raises: OmegaConfBaseException where a variable chooses a key and gives no value.
    """
    if not variables_in(tree):
        return FromEnvironment()
    marks = _Marks()
    with marks.in_place_of_resolvers():
        marked = OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=True)
    values_by_place: dict[Place, EnvironmentValue] = {}

    def walk(mark: Any, value: Any, path: Place) -> None:
        if isinstance(mark, str) and MARKED.search(mark):
            values_by_place[path] = marks.value(
                without_credentials(mark, reference=REFERENCE), value
            )
        elif isinstance(mark, Mapping):
            for key, item in mark.items():
                walk(item, value[key], (*path, key))
        elif isinstance(mark, list):
            for index, item in enumerate(mark):
                walk(item, value[index], (*path, index))

    walk(marked, values_of(config), ())
    return FromEnvironment(values_by_place)


class _Marks:
    """Marks that stand for `${oc.env:...}` in a text, and the source that each mark stands for."""

    def __init__(self) -> None:
        self._sources: list[str] = []
        self._names: list[tuple[str, ...]] = []

    @contextmanager
    def in_place_of_resolvers(self) -> Iterator[None]:
        resolvers: dict[str, Callable[..., Any]] = {
            "env": self._env,
            "decode": self._decode,
            "create": self._create,
        }
        register = partial(OmegaConf.register_resolver, replace=True, annotation_validation="off")
        try:
            for name, resolver in resolvers.items():
                register(f"oc.{name}", resolver)
            yield
        finally:
            for name in resolvers:
                register(f"oc.{name}", getattr(oc, name))

    def value(self, marked: str, value: Any) -> EnvironmentValue:
        names = tuple(dict.fromkeys(self._names_in(marked)))
        return EnvironmentValue(
            self._expand(marked, str), self._expand(marked, escape), names, value
        )

    def _mark(self, source: str, names: Sequence[str]) -> str:
        self._sources.append(source)
        self._names.append(tuple(names))
        return MARK.format(len(self._sources) - 1)

    def _env(self, key: str, *default: Any) -> str:
        quoted = [
            "null" if d is None else self._quoted(without_credentials(str(d), reference=REFERENCE))
            for d in default
        ]
        names = [key, *(name for d in default for name in self._names_in(str(d)))]
        return self._mark(f"${{oc.env:{','.join([key, *quoted])}}}", names)

    def _decode(self, text: str | None, _parent_: Any, _node_: Any) -> Any:
        return self._made_of("decode", text, lambda: oc.decode(text, _parent_, _node_))

    def _create(self, text: Any, _parent_: Any) -> Any:
        return self._made_of("create", text, lambda: oc.create(text, _parent_))

    def _made_of(self, name: str, text: Any, otherwise: Callable[[], Any]) -> Any:
        if not isinstance(text, str) or not MARKED.search(text):
            return otherwise()
        whole = MARKED.fullmatch(text)
        inner = self._sources[int(whole[1])] if whole else self._quoted(text)
        return self._mark(f"${{oc.{name}:{inner}}}", self._names_in(text))

    def _names_in(self, text: str) -> list[str]:
        return [name for mark in MARKED.finditer(text) for name in self._names[int(mark[1])]]

    def _quoted(self, text: str) -> str:
        """Return a marked text as an argument of a resolver, quoted unless it is one mark."""
        inside = self._expand(text, escape)
        if MARKED.fullmatch(text):
            return inside
        return "'" + re.sub(r"(\\*)'", r"\1\1\\'", inside) + "'"

    def _expand(self, marked: str, literal: Callable[[str], str]) -> str:
        """Return a text with its marks replaced by the interpolations that they stand for.

        `literal` is applied to each piece of text between marks.
        """
        pieces = MARKED.split(marked)
        out = ""
        for index, piece in enumerate(pieces):
            if index % 2:
                out += self._sources[int(piece)]
                continue
            text = literal(piece)
            if literal is escape and index + 1 < len(pieces):  # a backslash would escape the next
                text += "\\" * (len(text) - len(text.rstrip("\\")))
            out += text
        return out
