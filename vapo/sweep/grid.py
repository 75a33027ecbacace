"""A grid file: from its entries to named rows. Its format: docs/sweeps.md.

Each kind of entry in `rows` is a class here, which says what such an entry may contain.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from vapo.config import Components
from vapo.config.credentials import without_credentials
from vapo.config.layers import Layer, read_text
from vapo.errors import UserError


@dataclass(frozen=True)
class Row:
    """One line of the table: what is merged over the base config, and the paper's score.

    `folder` is the grid file's, in which the overrides are written.
    """

    name: str
    system: str
    component_off: str = ""
    configs: tuple[Path, ...] = ()
    overrides: tuple[str, ...] = ()
    folder: Path | None = None
    paper_score: float | None = None


@dataclass(frozen=True)
class Grid:
    """`full_system` is the row that the others are compared with; None: no comparison."""

    name: str
    description: str
    full_system: str | None
    rows: tuple[Row, ...]


def component_names() -> tuple[str, ...]:
    """The switches, from the dataclass: a new component is in every ablation at once."""
    return tuple(field.name for field in dataclasses.fields(Components))


def _component(name: str) -> str:
    if name not in component_names():
        raise ValueError(_unknown(name, component_names()))
    return name


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Entry(_Block):
    """What an entry of any kind may say. `configs` are relative to the grid file."""

    system: str | None = None
    configs: list[str] = []
    overrides: dict[str, Any] = {}

    def _row(
        self, folder: Path, name: str, overrides: Iterable[str], system: str = "vapo", **more: Any
    ) -> Row:
        return Row(
            name,
            self.system or system,
            configs=tuple(folder / path for path in self.configs),
            overrides=(*_overrides(self.overrides), *overrides),
            folder=folder,
            **more,
        )


class NamedRow(Entry):
    """`row: NAME`: one row."""

    row: str
    component_off: Annotated[str, AfterValidator(_component)] = ""
    paper_score: float | None = None

    def rows(self, folder: Path) -> Iterator[Row]:
        more = {"component_off": self.component_off, "paper_score": self.paper_score}
        yield self._row(folder, self.row, (), self.row, **more)


class WithoutComponents(Entry):
    """`without_components: true`: a row `without X` for every field of `Components`."""

    without_components: Literal[True]
    paper_scores: dict[Annotated[str, AfterValidator(_component)], float] = {}

    def rows(self, folder: Path) -> Iterator[Row]:
        for name in component_names():
            switch = f"components.{name}.enabled=false"
            score = self.paper_scores.get(name)
            yield self._row(
                folder, f"without {name}", [switch], component_off=name, paper_score=score
            )


class _Combinations(Entry):
    """A row for each mapping of keys to values."""

    paper_scores: list[float | None] | None = None

    def _rows(self, folder: Path, combinations: list[dict[str, Any]]) -> Iterator[Row]:
        scores = self.paper_scores or [None] * len(combinations)
        if len(scores) != len(combinations):
            raise ValueError(f"{len(scores)} paper_scores for {len(combinations)} rows")
        for values, score in zip(combinations, scores, strict=True):
            name = ", ".join(
                f"{key.rpartition('.')[2]} {without_credentials(_text(value))}"
                for key, value in values.items()
            )
            yield self._row(folder, name, _overrides(values), paper_score=score)


class Product(_Combinations):
    """`product: {key: [values]}`: a row for every combination."""

    product: dict[str, Annotated[list[Any], Field(min_length=1)]]

    def rows(self, folder: Path) -> Iterator[Row]:
        chosen = itertools.product(*self.product.values())
        combinations = [dict(zip(self.product, values, strict=True)) for values in chosen]
        return self._rows(folder, combinations)


class RowList(_Combinations):
    """`list: [{key: value}, ...]`: a row for every mapping."""

    items: list[Annotated[dict[str, Any], Field(min_length=1)]] = Field(alias="list")

    def rows(self, folder: Path) -> Iterator[Row]:
        return self._rows(folder, self.items)


_KINDS: dict[str, type[NamedRow | WithoutComponents | Product | RowList]] = {
    "row": NamedRow,
    "without_components": WithoutComponents,
    "product": Product,
    "list": RowList,
}


class _File(_Block):
    description: str = ""
    full_system: str | None = None
    rows: list[dict[str, Any]] = Field(min_length=1)


def read_grid(path: Path) -> Grid:
    """Raises: UserError that names the file, the line and the key."""
    try:
        layer = read_text(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text in UTF-8"
        raise UserError(f"--grid {path}: {reason}") from None
    file = _checked(_File, layer.tree, layer, "")
    rows: list[Row] = []
    for number, content in enumerate(file.rows):
        kinds = [kind for kind in _KINDS if kind in content]
        place = f"rows.{number}"
        if len(kinds) != 1:
            raise UserError(f"{layer.place(place)}: {place}: write one of {', '.join(_KINDS)}")
        entry = _checked(_KINDS[kinds[0]], content, layer, place)
        try:
            rows += entry.rows(path.parent)
        except ValueError as error:
            raise UserError(f"{layer.place(place)}: {place}: {error}") from None
    names = [row.name for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{path}: two rows have the name '{twice[0]}'")
    if file.full_system is not None and file.full_system not in names:
        raise UserError(
            f"{layer.place('full_system')}: full_system '{file.full_system}' is not a row: "
            f"{', '.join(names)}"
        )
    return Grid(path.stem, file.description.strip(), file.full_system, tuple(rows))


def choose_rows(grid: Grid, chosen: Sequence[str]) -> Grid:
    """The grid with only these rows, in its own order; nothing chosen: all of them.

    Each text names one row, or several with commas between them; a row's own name may have
    commas. Without its full system the grid has no comparison.

    Raises: UserError for a name that is no row's, with the nearest that is.
    """
    if not chosen:
        return grid
    known = [row.name for row in grid.rows]
    names = {name for text in chosen for name in _split_names(text, known)}
    full_system = grid.full_system if grid.full_system in names else None
    rows = tuple(row for row in grid.rows if row.name in names)
    return dataclasses.replace(grid, full_system=full_system, rows=rows)


def _split_names(text: str, known: Sequence[str]) -> Iterator[str]:
    """The longest known name first: `eps_low 0.1, eps_high 0.2` is one row's."""
    parts = text.split(",")
    while parts:
        ends = range(len(parts), 0, -1)
        candidates = {end: ",".join(parts[:end]).strip() for end in ends}
        end = next((end for end in ends if candidates[end] in known), None)
        if end is None:
            raise UserError(f"--rows: {_no_such_row(candidates[1], known)}")
        yield candidates[end]
        del parts[:end]


def _no_such_row(name: str, known: Sequence[str]) -> str:
    """What to say of a name; letters of the other case count as near."""
    by_lower = {row.lower(): row for row in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    hint = f"did you mean '{by_lower[close[0]]}'? " if close else ""
    return f"the grid has no row '{name}'; {hint}rows: {'; '.join(known)}"


_T = TypeVar("_T", bound=BaseModel)


def _checked(kind: type[_T], content: Mapping[str, Any], layer: Layer, prefix: str) -> _T:
    """The content as a block of this kind; the first fault in it is the error."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        # an unknown key first: it is often the one that is missing, misspelt
        fault = min(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
        names = [prefix, *(str(part) for part in fault["loc"] if part != "[key]")]
        key = ".".join(name for name in names if name)
        if fault["type"] == "extra_forbidden":
            known = [field.alias or name for name, field in kind.model_fields.items()]
            said = _unknown(str(fault["loc"][-1]), known)
        elif fault["type"] == "value_error":
            said = str(fault["ctx"]["error"])
        elif fault["type"] == "missing":
            said = "is missing"
        else:
            said = f"{fault['msg']}, got {fault['input']!r}"
        raise UserError(f"{layer.place(key)}: {key}: {said}") from None


def _unknown(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"
    return f"unknown key '{name}'; {hint}"


def _overrides(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={_text(value)}" for key, value in values.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
