"""Render the table as Markdown, as CSV and as a page of HTML."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vapo.sweep.report.estimates import MeanOfSeeds
from vapo.sweep.report.run_records import AVERAGE, FRESH, RECENT
from vapo.sweep.report.runs import Collection
from vapo.sweep.report.table import RowResult, conclusion, shown_scores
from vapo.sweep.report.tables import (
    csv_cell,
    csv_text,
    markdown_cell,
    markdown_table,
    markdown_text,
)

_STYLE = """
body { font: 11pt/1.45 system-ui, sans-serif; color: #1a1a1a; max-width: 60em; margin: 2em auto;
       padding: 0 1em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3em .8em; text-align: right; border-bottom: 1px solid #ccc; }
th { border-bottom: 2px solid #1a1a1a; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
tr.full td { font-weight: 600; border-top: 1px solid #1a1a1a; }
img { max-width: 100%; margin: 1em 0; }
figure { margin: 2em 0; break-inside: avoid; }
"""
_CSV_COLUMNS = (
    "row", "num_runs", "score", "score_low", "score_high", "score_seeds", "difference",
    "difference_low", "difference_high", "difference_seeds", "difference_p", "how", "common_seeds",
    "paper_score", "paper_difference", "sign", "beyond_interval", "score_over", "difference_over",
    *(f"{name}{part}" for name in ("fresh", "recent", "average") for part in (
        "_score", "_low", "_high", "_seeds", "_over", "_difference", "_difference_low",
        "_difference_high", "_difference_seeds", "_difference_over",
    )),
)  # fmt: skip
_TITLES = {FRESH: "fresh prompts, %", RECENT: "last policies, %", AVERAGE: "averaged, %"}


def columns(
    collection: Collection, table: Sequence[RowResult]
) -> dict[str, Callable[[RowResult], str]]:
    """Return column title -> function from a row to the text of its cell."""
    cells: dict[str, Callable[[RowResult], str]] = {
        "row": lambda row: row.name,
        "seeds": lambda row: str(row.num_runs),
        "score, %": lambda row: _estimate(row.score),
    }
    full = collection.full_system
    if full:
        cells[f"difference to {full}"] = lambda row: _difference(row)
    for key in shown_scores(table):
        cells[_TITLES[key]] = _other(key, is_difference=False)
        if full and key == FRESH:
            cells["difference, fresh"] = _other(key, is_difference=True)
    if any(row.paper_score is not None for row in collection.rows):
        cells["paper"] = lambda row: _number(row.paper_score)
        if full:
            cells["paper's difference"] = lambda row: _number(row.paper_difference, signed=True)
            cells["sign"] = _sign
    return cells


def markdown(collection: Collection, table: Sequence[RowResult]) -> str:
    cells = columns(collection, table)
    rows = []
    for row in table:
        texts = [markdown_cell(cell(row)) for cell in cells.values()]
        if row.name == collection.full_system:
            texts = [f"**{text}**" if text else "" for text in texts]
        rows.append(texts)
    lines = markdown_table([*map(markdown_cell, cells)], rows, align="lr")
    sentences = map(markdown_text, conclusion(collection, table))
    return "\n".join([lines, "", *sentences]) + "\n"


def as_csv(table: Sequence[RowResult]) -> str:
    """Return the table's numbers, unrounded, as CSV. A missing number is an empty field."""
    rows = [
        [csv_cell(row.name), row.num_runs, *_numbers(row.score), *_numbers(row.difference),
         row.difference and row.difference.p, row.how, row.common_seeds,
         row.paper_score, row.paper_difference, row.sign,
         str("" if row.is_shown is None else row.is_shown).lower(),
         row.score and row.score.over, row.difference and row.difference.over,
         *(cell for key in (FRESH, RECENT, AVERAGE) for cell in _other_numbers(row, key))]
        for row in table
    ]  # fmt: skip
    return csv_text(_CSV_COLUMNS, rows)


def page(
    collection: Collection, table: Sequence[RowResult], figures: Mapping[str, tuple[str, Path]]
) -> str:
    """Return the report as one HTML file.

    Args:
        figures: figure name -> (caption, PNG file).
    """
    cells = columns(collection, table)
    head = "".join(f"<th>{html.escape(title)}</th>" for title in cells)
    body = ""
    for row in table:
        mark = ' class="full"' if row.name == collection.full_system else ""
        data = "".join(f"<td>{html.escape(cell(row))}</td>" for cell in cells.values())
        body += f"<tr{mark}>{data}</tr>"
    below = "".join(f"<p>{html.escape(line)}</p>" for line in conclusion(collection, table))
    for caption, path in figures.values():
        data, text = base64.b64encode(path.read_bytes()).decode(), html.escape(caption)
        below += (
            f'<figure><img alt="{text}" src="data:image/png;base64,{data}">'
            f"<figcaption>{text}</figcaption></figure>"
        )
    title = html.escape(collection.title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"{below}</body></html>\n"
    )


def _estimate(value: MeanOfSeeds | None, *, signed: bool = False) -> str:
    if value is None:
        return ""
    sign = "+" if signed else ""
    text = value.text(sign)
    seeds = ", ".join(f"{seed_mean:{sign}.1f}" for seed_mean in value.seeds)
    p = "" if value.p is None else f"p {value.p:.2g}"
    over = "over prompts, one seed" if value.over == "prompts" else ""
    notes = "; ".join(filter(None, (seeds, p, over)))
    return f"{text} ({notes})" if notes else text


def _difference(row: RowResult) -> str:
    text, common = _estimate(row.difference, signed=True), row.common_seeds
    return text if common is None else f"{text} ({common} common seed{'s' * (common > 1)})"


def _other(key: str, *, is_difference: bool) -> Callable[[RowResult], str]:
    def cell(row: RowResult) -> str:
        comparison = row.other_scores.get(key)
        if comparison is None:
            return ""
        value = comparison.difference if is_difference else comparison.score
        return _estimate(value, signed=is_difference)

    return cell


def _other_numbers(row: RowResult, key: str) -> list[float | str | None]:
    comparison = row.other_scores.get(key)
    estimates = (None, None) if comparison is None else (comparison.score, comparison.difference)
    return [
        cell
        for estimate in estimates
        for cell in (*_numbers(estimate), None if estimate is None else estimate.over)
    ]


def _number(value: float | None, *, signed: bool = False) -> str:
    return "" if value is None else f"{value:{'+' if signed else ''}g}"


def _sign(row: RowResult) -> str:
    """Return whether a row's difference has the paper's sign, and whether it is clear, as text."""
    if row.sign not in ("agrees", "differs"):
        return row.sign
    return f"{row.sign}, clear" if row.is_shown else f"{row.sign}, no difference shown"


def _numbers(value: MeanOfSeeds | None) -> list[float | str | None]:
    if value is None:
        return [None, None, None, None]
    seeds = " ".join(map(str, value.seeds))
    return [value.mean, *(value.interval or (None, None)), seeds or None]
