"""A grid file: from its entries to named rows. Its format: docs/sweeps.md.

An entry of `rows` is one of
    row: NAME                  one row; `configs`, `overrides`, `paper_score`
    without_components: true   a row `without X` for every field of `Components`
    product: {key: [values]}   a row for every combination
    list: [{key: value}, ...]  a row for every mapping
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vapo.config import Components
from vapo.config.limits import compose
from vapo.config.uris import without_credentials
from vapo.errors import UserError

_GRID_KEYS = ("description", "full_system", "rows")
_COMMON = ("system", "configs", "overrides")
_ENTRY_KEYS = {
    "row": ("component_off", "paper_score"),
    "without_components": ("paper_scores",),
    "product": ("paper_scores",),
    "list": ("paper_scores",),
}


@dataclass(frozen=True)
class Row:
    """One line of the table: what is merged over the base config, and the paper's score."""

    name: str
    system: str
    component_off: str = ""
    configs: tuple[Path, ...] = ()
    overrides: tuple[str, ...] = ()
    paper_score: float | None = None


@dataclass(frozen=True)
class Grid:
    """`full_system` is the row that the others are compared with; None: no comparison."""

    name: str
    description: str
    full_system: str | None
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class _Entry:
    """One entry of `rows`, and where it stands, for errors."""

    file: Path
    place: str
    content: Mapping[str, Any] = field(default_factory=dict)

    def error(self, message: str) -> UserError:
        return UserError(f"{self.file}: {self.place}: {message}")

    def get(self, key: str, kind: type, default: Any) -> Any:
        value = self.content.get(key, default)
        if value is not default and not isinstance(value, kind):
            raise self.error(f"{key} must be a {kind.__name__}, got {value!r}")
        return value

    def common(self) -> dict[str, Any]:
        folder = self.file.parent
        paths = [str(path) for path in self.get("configs", list, [])]
        return {
            "configs": tuple(Path(path) if path[:1] == "/" else folder / path for path in paths),
            "overrides": _overrides(self.get("overrides", dict, {})),
        }


def read_grid(path: Path) -> Grid:
    """Raises: UserError that names the file and the entry."""
    try:
        text = path.read_text(encoding="utf-8")
        compose(text)  # its limits
        content = yaml.safe_load(text)
    except OSError as error:
        raise UserError(f"--grid {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UserError(f"--grid {path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise UserError(f"--grid {path}: a grid is a mapping with a list `rows`")
    _check_keys(_Entry(path, "the grid", content), content, _GRID_KEYS)
    rows: list[Row] = []
    for number, item in enumerate(content["rows"], start=1):
        entry = _Entry(path, f"entry {number} of rows", item if isinstance(item, dict) else {})
        rows += _rows(entry)
    names = [row.name for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{path}: two rows have the name '{twice[0]}'")
    full_system = content.get("full_system")
    if full_system is not None and full_system not in names:
        raise UserError(f"{path}: full_system '{full_system}' is not a row: {', '.join(names)}")
    return Grid(path.stem, str(content.get("description", "")).strip(), full_system, tuple(rows))


def _rows(entry: _Entry) -> Iterable[Row]:
    kinds = [kind for kind in _ENTRY_KEYS if kind in entry.content]
    if len(kinds) != 1:
        raise entry.error(f"an entry has exactly one of {', '.join(_ENTRY_KEYS)}")
    _check_keys(entry, entry.content, (kinds[0], *_COMMON, *_ENTRY_KEYS[kinds[0]]))
    if kinds[0] == "row":
        return [_named(entry)]
    if kinds[0] == "without_components":
        return _without_components(entry)
    return _from_values(entry, kinds[0])


def _named(entry: _Entry) -> Row:
    component = entry.get("component_off", str, "")
    if component:
        _check_keys(entry, [component], component_names())
    name = str(entry.content["row"])
    return Row(
        name=name,
        system=entry.get("system", str, name),
        component_off=component,
        paper_score=_score(entry, entry.content.get("paper_score")),
        **entry.common(),
    )


def component_names() -> tuple[str, ...]:
    """The switches, from the dataclass: a new component is in every ablation at once."""
    return tuple(field.name for field in dataclasses.fields(Components))


def _without_components(entry: _Entry) -> Iterator[Row]:
    if entry.content["without_components"] is not True:
        raise entry.error("without_components must be true; leave the entry out otherwise")
    scores = entry.get("paper_scores", dict, {})
    _check_keys(entry, scores, component_names())
    common = entry.common()
    for component in component_names():
        switch = f"components.{component}.enabled=false"
        yield Row(
            name=f"without {component}",
            system=entry.get("system", str, "vapo"),
            component_off=component,
            configs=common["configs"],
            overrides=(*common["overrides"], switch),
            paper_score=_score(entry, scores.get(component)),
        )


def _from_values(entry: _Entry, kind: str) -> Iterator[Row]:
    combinations = _product(entry) if kind == "product" else _list(entry)
    scores = entry.get("paper_scores", list, [None] * len(combinations))
    if len(scores) != len(combinations):
        raise entry.error(f"{len(scores)} paper_scores for {len(combinations)} rows")
    common = entry.common()
    for values, score in zip(combinations, scores, strict=True):
        name = ", ".join(
            f"{key.rpartition('.')[2]} {without_credentials(_text(v))}" for key, v in values.items()
        )
        yield Row(
            name=name,
            system=entry.get("system", str, "vapo"),
            configs=common["configs"],
            overrides=(*common["overrides"], *_overrides(values)),
            paper_score=_score(entry, score),
        )


def _product(entry: _Entry) -> list[dict[str, Any]]:
    axes = entry.get("product", dict, {})
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise entry.error(f"product: {key} must be a list of values, got {values!r}")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _list(entry: _Entry) -> list[dict[str, Any]]:
    items = entry.get("list", list, [])
    for item in items:
        if not isinstance(item, dict) or not item:
            raise entry.error(f"list: each item maps keys to values, got {item!r}")
    return items


def _overrides(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={_text(value)}" for key, value in values.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _score(entry: _Entry, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise entry.error(f"a paper score is a number, got {value!r}")
    return float(value)


def _check_keys(entry: _Entry, given: Iterable[str], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"
            raise entry.error(f"unknown key '{key}'; {hint}")
