"""Read a grid file and turn its entries into named rows. The format is in docs/sweeps.md.

Each kind of entry in `rows` is a class here, which says what such an entry may contain.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from vapo.config import Components, FitConfig
from vapo.config.credentials import without_credentials
from vapo.config.layers import Layer, read_text, text_of
from vapo.config.options import describe
from vapo.config.overrides import override_of
from vapo.config.spelling import as_spelled, null_excess
from vapo.errors import UserError
from vapo.errors.suggestions import nearest_name


@dataclass(frozen=True)
class GridRow:
    """One row of a grid: what is merged over the base config, and the paper's score.

    Attributes:
        system: the algorithm's name, for the report.
        component_off: the component that the row switches off; "" if none.
        configs: config files that are merged over the base config, before `overrides`.
        folder: the grid file's folder. Relative paths in the overrides start there.
    """

    name: str
    system: str = "vapo"
    component_off: str = ""
    paper_score: float | None = None
    configs: tuple[Path, ...] = ()
    overrides: tuple[str, ...] = ()
    folder: Path | None = None


@dataclass(frozen=True)
class Grid:
    """A grid's rows.

    Attributes:
        full_system: the name of the row with which the report compares all others; None for no
            comparison.
    """

    name: str
    description: str
    full_system: str | None
    rows: tuple[GridRow, ...]


def component_names() -> tuple[str, ...]:
    """Return the names of VAPO's components, so that an ablation has each new one at once."""
    return tuple(field.name for field in dataclasses.fields(Components))


def _component(name: str) -> str:
    if name not in component_names():
        raise ValueError(_unknown(name, component_names()))
    return name


_Component = Annotated[str, AfterValidator(_component)]


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Entry(_Block):
    """The keys that entries of every kind may have.

    `configs` are paths from the grid file's folder.
    """

    system: str | None = None
    configs: list[str] = []
    overrides: dict[str, Any] = {}

    def rows(self, folder: Path) -> Iterator[GridRow]:
        for row in self.entry_rows():
            yield dataclasses.replace(
                row,
                system=self.system or row.system,
                configs=tuple(folder / path for path in self.configs),
                overrides=(*_overrides(self.overrides), *row.overrides),
                folder=folder,
            )

    @abstractmethod
    def entry_rows(self) -> Iterable[GridRow]:
        """Return the entry's rows, made from the keys of its kind. `rows` adds the common keys."""


class NamedRow(Entry):
    """An entry `row: NAME`, which makes one row."""

    row: str
    component_off: _Component = ""
    paper_score: float | None = None

    def entry_rows(self) -> Iterable[GridRow]:
        return [GridRow(self.row, self.row, self.component_off, self.paper_score)]


class WithoutComponents(Entry):
    """An entry `without_components: true`, which makes a row `without X` for each component X."""

    without_components: Literal[True]
    paper_scores: dict[_Component, float] = {}

    def entry_rows(self) -> Iterable[GridRow]:
        for name in component_names():
            switch, score = f"components.{name}.enabled=false", self.paper_scores.get(name)
            yield GridRow(f"without {name}", "vapo", name, score, overrides=(switch,))


class _Combinations(Entry):
    """An entry that makes a row of each mapping of config keys to values."""

    paper_scores: list[float | None] | None = None

    def combination_rows(self, combinations: Sequence[dict[str, Any]]) -> Iterator[GridRow]:
        scores = self.paper_scores or [None] * len(combinations)
        if len(scores) != len(combinations):
            raise ValueError(f"{len(scores)} paper_scores for {len(combinations)} rows")
        for values, score in zip(combinations, scores, strict=True):
            name = ", ".join(
                f"{key.rpartition('.')[2]} {without_credentials(as_text(value))}"
                for key, value in values.items()
            )
            yield GridRow(name, paper_score=score, overrides=_overrides(values))


class Product(_Combinations):
    """An entry `product: {key: [values]}`, which makes a row for every combination of values."""

    product: dict[str, Annotated[list[Any], Field(min_length=1)]]

    def entry_rows(self) -> Iterable[GridRow]:
        combinations = itertools.product(*self.product.values())
        return self.combination_rows(
            [dict(zip(self.product, values, strict=True)) for values in combinations]
        )


class RowList(_Combinations):
    """An entry `list: [{key: value}, ...]`, which makes a row for every mapping."""

    items: list[Annotated[dict[str, Any], Field(min_length=1)]] = Field(alias="list")

    def entry_rows(self) -> Iterable[GridRow]:
        return self.combination_rows(self.items)


_KINDS: dict[str, type[Entry]] = {
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
    """Read a grid file.

    Raises: UserError: the file has a fault. The error names the file, the line and the key.
    """
    layer = read_text(text_of(path, option="--grid"), str(path))
    entries = describe(FitConfig)
    layer = as_spelled(layer, entries, _config_key)
    for key, source in layer.sources.items():
        if reason := null_excess(source, entries.get(_config_key(key))):
            raise UserError(f"{layer.place(key)}: {key}: {reason}")
    file = _checked(_File, layer.tree, layer, "")
    rows: list[GridRow] = []
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


def _config_key(path: str) -> str:
    """Return the config key that a path in a grid file sets; the path itself if it sets none."""
    in_row = re.fullmatch(r"rows\.\d+\.(overrides|product|list\.\d+)\.(.+)", path)
    if in_row is None:
        return path
    kind, key = in_row.groups()
    return re.sub(r"\.\d+", "", key, count=1) if kind == "product" else key


def choose_rows(grid: Grid, row_texts: Sequence[str]) -> Grid:
    """Return the grid with the chosen rows alone, in the grid's order.

    Without texts, all rows stay. If the full system is not chosen, there is no comparison.

    Args:
        row_texts: each names one row, or several with commas between them. A row's own name may
            have commas, too.

    Raises: UserError: no row has such a name. The error gives the nearest name.
    """
    if not row_texts:
        return grid
    row_names = [row.name for row in grid.rows]
    names = {name for text in row_texts for name in _split_names(text, row_names)}
    full_system = grid.full_system if grid.full_system in names else None
    rows = tuple(row for row in grid.rows if row.name in names)
    return dataclasses.replace(grid, full_system=full_system, rows=rows)


def _split_names(text: str, row_names: Sequence[str]) -> Iterator[str]:
    """Yield the names of rows in a text with commas between them.

    A row's own name may have commas, as `eps_low 0.1, eps_high 0.2`, so the longest name is taken.

    Raises: UserError: no row has the next name.
    """
    parts = text.split(",")
    while parts:
        for end in range(len(parts), 0, -1):
            if (name := ",".join(parts[:end]).strip()) in row_names:
                break
        else:
            hint = f"{_did_you_mean(name, row_names)} rows: {'; '.join(row_names)}".strip()
            raise UserError(f"--rows: the grid has no row '{name}'; {hint}")
        yield name
        del parts[:end]


_T = TypeVar("_T", bound=BaseModel)


def _checked(kind: type[_T], content: Mapping[str, Any], layer: Layer, prefix: str) -> _T:
    """Return the content, checked, as an instance of `kind`.

    Raises: UserError: the content has a fault. The error names one of them and its key.

    Args:
        layer: the file, for the error.
        prefix: the path of the content in the file.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        # An unknown key comes first: it is often the missing key, misspelt.
        fault = min(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
        names = [prefix, *(str(part) for part in fault["loc"] if part != "[key]")]
        key = ".".join(name for name in names if name)
        if fault["type"] == "extra_forbidden":
            field_names = [field.alias or name for name, field in kind.model_fields.items()]
            message = _unknown(str(fault["loc"][-1]), field_names)
        elif fault["type"] == "value_error":
            message = str(fault["ctx"]["error"])
        elif fault["type"] == "missing":
            message = "is missing"
        else:
            message = f"{fault['msg']}, got {fault['input']!r}"
        raise UserError(f"{layer.place(key)}: {key}: {message}") from None


def _unknown(name: str, names: Iterable[str]) -> str:
    names = list(names)
    hint = _did_you_mean(name, names) or f"known: {', '.join(names)}"
    return f"unknown key '{name}'; {hint}"


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question that names the nearest known name; "" if none is near. Case is ignored."""
    by_lower = {known_name.lower(): known_name for known_name in names}
    nearest = nearest_name(name.lower(), by_lower)
    return f"did you mean '{by_lower[nearest]}'?" if nearest else ""


def _overrides(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(override_of(key, value) for key, value in values.items())


def as_text(value: Any) -> str:
    """Return a value as text: a string unchanged, anything else as JSON, such as `true`."""
    return value if isinstance(value, str) else json.dumps(value)
