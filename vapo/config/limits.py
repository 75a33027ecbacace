"""Bounds on a config's text, checked before anything is expanded.

A few lines of YAML can stand for billions of nodes (aliases of aliases) or characters
(interpolations of interpolations), and for more levels than Python's stack has. All limits are
far above what a config needs; what is above one is an error that names its line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

MAX_FILE_BYTES = 2**17
"""The largest config file; PyYAML reads about this much in a second."""

MAX_EXTENDING = 100
"""The longest chain of files of which each extends the next."""

MAX_CONFIG_DEPTH = 32
"""The deepest nesting of blocks and lists."""

MAX_NODES = 10_000
"""The most keys, values and list items, once aliases are expanded."""

MAX_NUMBER_CHARS = 100
MAX_INTEGER = 2**63 - 1

MAX_INTERPOLATED_CHARS = 4_000
"""The longest text with an interpolation, as it is written."""

MAX_INTERPOLATIONS = 50
"""The most interpolations in one text."""

MAX_NESTED_INTERPOLATIONS = 8
MAX_FOLLOWED = 1_000
"""The most interpolations of a config, with those in the texts that they point to."""

MAX_EXPANDED_CHARS = 100_000
"""The most characters of all texts with interpolations, expanded."""

_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
_ENVIRONMENT = re.compile(r"\s*oc\.env\s*:")
"""Begins an interpolation of a variable. A default that is an interpolation counts by itself."""

_DECODED_ENVIRONMENT = re.compile(r"\$\{\s*oc\.decode\s*:\s*(\$\{\s*oc\.env\s*:[^${}]*\})\s*\}")
"""A number from the environment, which counts as one interpolation and not as a nested one."""

_READING = re.compile(r"\$\{\s*oc\.(?:decode|create)\b")
"""Begins a call that reads its argument as YAML once more, with escaped interpolations."""


class LimitError(yaml.MarkedYAMLError):
    """Raised for valid YAML that is above one of the limits of this module."""


class BoundedLoader(yaml.SafeLoader):
    """A YAML loader that raises `LimitError` at the first node that is too deep or too many."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_nodes = 0
        self._sizes: dict[int, int] = {}  # of a whole node, aliases in it expanded

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        num_nodes_outside = self._num_nodes
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
            self._sizes[id(node)] = self._num_nodes - num_nodes_outside
        if self._num_nodes > MAX_NODES:
            at = f"'*{event.anchor}': " if isinstance(event, yaml.AliasEvent) else ""
            self._stop(f"{at}more than {MAX_NODES} keys and values, aliases expanded", event)
        return node

    def _stop(self, problem: str, event: yaml.Event) -> None:
        raise LimitError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]


def composed_node(text: str) -> yaml.Node | None:
    """Return the root node of a YAML text, or None if it is empty.

    Raises: LimitError: it is above a limit. yaml.YAMLError: it is not valid YAML.
    """
    loader = BoundedLoader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
    finally:
        loader.dispose()
    return node


def scalar_excess(node: yaml.ScalarNode) -> str | None:
    """Return why a scalar of YAML is too long or has too many interpolations, or None."""
    is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    if not is_number or len(node.value) <= MAX_NUMBER_CHARS:
        return interpolation_excess(node.value)
    return (
        f"a number of {len(node.value)} characters, where {MAX_NUMBER_CHARS} are allowed; "
        "quote it if it is text"
    )


def integer_excess(value: Any) -> str | None:
    """Return why an integer, or one in a list or mapping, is too large, or None."""
    if isinstance(value, (Mapping, list)):
        items = value.values() if isinstance(value, Mapping) else value
        return next(filter(None, map(integer_excess, items)), None)
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return f"an integer of {value.bit_length()} bits, where 63 are allowed"
    return None


def interpolation_excess(text: str) -> str | None:
    """Return why a text's interpolations are too long, too many or too deep, or None."""
    num_pieces = len(_pieces(text))
    if not num_pieces:
        return None
    if len(text) > MAX_INTERPOLATED_CHARS:
        return (
            f"a text of {len(text)} characters with interpolations, where "
            f"{MAX_INTERPOLATED_CHARS} are allowed"
        )
    if num_pieces > MAX_INTERPOLATIONS:
        return f"{num_pieces} interpolations in one text, where {MAX_INTERPOLATIONS} are allowed"
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


Path = tuple[str, ...]


def expansion_excess(tree: Mapping[Any, Any]) -> tuple[str, str] | None:
    """Return the dotted key whose interpolations expand too far, and why; None if none does.

    Nothing is resolved: the interpolations are followed as a graph, each text once. Where an
    interpolation's target is not known (its key contains an interpolation, or is not in the tree),
    it counts as if it followed every text, each as often as possible: the product of their numbers
    of interpolations. A text that refers to itself counts as empty here; resolving it is an error.
    """
    texts = {path: _DECODED_ENVIRONMENT.sub(r"\1", text) for path, text in _texts(tree, ())}
    pieces = {path: parts for path, text in texts.items() if (parts := _pieces(text))}
    below: dict[Path, list[Path]] = {}
    for path in texts:
        for length in range(1, len(path) + 1):
            below.setdefault(path[:length], []).append(path)
    most_followed = math.prod(map(len, pieces.values()))
    largest = (most_followed, most_followed * max(map(len, texts.values()), default=0))
    sizes: dict[Path, tuple[int, int]] = {}

    def size(path: Path) -> tuple[int, int]:
        """Return how many interpolations a text follows, and how many characters it expands to."""
        if path not in sizes:
            sizes[path] = (0, 0)  # should it come to itself
            sizes_below = [(0, len(texts[path]))]
            for piece in pieces.get(path, ()):
                targets = _targets(piece, path, below, texts)
                sizes_below += [(1, 0), *([largest] if targets is None else map(size, targets))]
            followed, chars = zip(*sizes_below, strict=True)
            sizes[path] = (sum(followed), sum(chars))
        return sizes[path]

    num_followed = num_chars = 0
    for path in pieces:
        followed, chars = size(path)
        num_followed, num_chars = num_followed + followed, num_chars + chars
        if num_followed > MAX_FOLLOWED or num_chars > MAX_EXPANDED_CHARS:
            return ".".join(path), (
                "the interpolations, with those in the texts that they point to, come to more "
                f"than {MAX_FOLLOWED}, or to more than {MAX_EXPANDED_CHARS} characters"
            )
    return None


def _texts(tree: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of every value in a tree; other values count as the text `0`."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for name, value in items:
        if isinstance(value, (Mapping, list)):
            yield from _texts(value, (*path, str(name)))
        else:
            yield (*path, str(name)), value if isinstance(value, str) else "0"


def _pieces(text: str) -> list[str]:
    """Return what follows `${` in each interpolation of a text.

    Escaped ones are included if the text calls oc.decode or oc.create, which read them again.
    """
    if _READING.search(text):
        return text.split("${")[1:]
    return _INTERPOLATION.split(text)[1:]


def _targets(
    piece: str, path: Path, below: Mapping[Path, list[Path]], texts: Mapping[Path, str]
) -> list[Path] | None:
    """Return the paths of the texts that an interpolation points to, or None if it is not known.

    Args:
        piece: what follows `${`.
        path: where the interpolation stands.
        below: for each key, the paths of all texts at or below it.
        texts: all texts by their paths.
    """
    inside, closing, _ = piece.partition("}")
    if _ENVIRONMENT.match(inside):
        return []
    if not closing or _READING.match(f"${{{inside}"):
        return None
    name = inside.partition(":")[2] if ":" in inside else inside
    name = name.partition(",")[0].strip(" \t'\"")
    num_dots = len(name) - len(name.lstrip("."))
    base = path[: max(len(path) - num_dots, 0)] if num_dots else ()
    target = (*base, *re.split(r"[.\[\]]+", name.strip(".]")))
    known_prefixes = (target[:length] for length in range(len(target), 0, -1))
    nearest = next((place for place in known_prefixes if place in below), None)
    # below a block that is an interpolation itself lies what that one points to
    is_found = nearest is not None and (nearest == target or nearest in texts)
    return below[nearest] if nearest is not None and is_found else None
