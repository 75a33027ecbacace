"""Bounds on a config's text, checked before anything is expanded.

A few lines of YAML can stand for billions of nodes (aliases of aliases), and for more levels than
Python's stack has. All limits are far above what a config needs; what is above one is an error that
names its line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

MAX_FILE_BYTES = 2**17
"""Of a file; PyYAML reads about so much in a second."""

MAX_EXTENDING = 100
"""Files that extend one another, in one chain."""

MAX_CONFIG_DEPTH = 32
"""Blocks and lists in one another."""

MAX_NODES = 10_000
"""Keys, values and list items, once aliases are expanded."""

MAX_NUMBER_CHARS = 100
MAX_INTEGER = 2**63 - 1

MAX_INTERPOLATED_CHARS = 4_000
"""Of a text that holds an interpolation, as it is written."""

MAX_INTERPOLATIONS = 50
"""In one text."""

MAX_NESTED_INTERPOLATIONS = 8


class LimitError(yaml.MarkedYAMLError):
    """Valid YAML that is above one of the limits."""


class BoundedLoader(yaml.SafeLoader):
    """Composes nodes; raises `LimitError` at the first that is too deep or too many."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_nodes = 0
        self._sizes: dict[int, int] = {}  # of a whole node, aliases in it expanded

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        before = self._num_nodes
        self._depth += 1
        if self._depth > MAX_CONFIG_DEPTH:
            self._stop(f"nested deeper than {MAX_CONFIG_DEPTH} levels", event)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._sizes:
                self._stop(f"the alias '*{event.anchor}' lies inside of what it stands for", event)
            self._num_nodes += self._sizes[id(node)]
        else:
            self._num_nodes += 1
            self._sizes[id(node)] = self._num_nodes - before
        if self._num_nodes > MAX_NODES:
            at = f"'*{event.anchor}': " if isinstance(event, yaml.AliasEvent) else ""
            self._stop(f"{at}more than {MAX_NODES} keys and values, aliases expanded", event)
        return node

    def _stop(self, problem: str, event: yaml.Event) -> None:
        raise LimitError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]


def composed_node(text: str) -> yaml.Node | None:
    """As `yaml.compose`, with the bounds above. Raises: yaml.YAMLError."""
    loader = BoundedLoader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
    finally:
        loader.dispose()
    return node


def scalar_excess(node: yaml.ScalarNode) -> str | None:
    """Why a value is refused before it is read, or None."""
    is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    if not is_number or len(node.value) <= MAX_NUMBER_CHARS:
        return interpolation_excess(node.value)
    return (
        f"a number of {len(node.value)} characters, where {MAX_NUMBER_CHARS} are allowed; "
        "quote it if it is text"
    )


def integer_excess(value: Any) -> str | None:
    """Why an integer, or one in a list or mapping, is refused, or None."""
    if isinstance(value, (Mapping, list)):
        items = value.values() if isinstance(value, Mapping) else value
        return next(filter(None, map(integer_excess, items)), None)
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return f"an integer of {value.bit_length()} bits, where 63 are allowed"
    return None


def interpolation_excess(text: str) -> str | None:
    """Why a text with interpolations is refused before it is parsed, or None."""
    found = text.count("${")
    if not found:
        return None
    if len(text) > MAX_INTERPOLATED_CHARS:
        return (
            f"a text of {len(text)} characters with interpolations, where "
            f"{MAX_INTERPOLATED_CHARS} are allowed"
        )
    if found > MAX_INTERPOLATIONS:
        return f"{found} interpolations in one text, where {MAX_INTERPOLATIONS} are allowed"
    if _nesting(text) > MAX_NESTED_INTERPOLATIONS:
        return f"interpolations nested deeper than {MAX_NESTED_INTERPOLATIONS} levels"
    return None


def _nesting(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "}]":
            depth = max(depth - 1, 0)
    return deepest
