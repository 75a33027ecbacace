"""What a name in a table must not become: a formula, a link, HTML, code, another cell."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from tests.studies.critics.test_report import CURVES
from tests.studies.gates.test_report import FIGURES
from tests.sweep.report.test_table import collection
from vapo.studies.critics import report as critics
from vapo.studies.gates import report as gates
from vapo.sweep.report.render import as_csv, markdown
from vapo.sweep.report.table import make_table
from vapo.sweep.report.tables import csv_cell, markdown_cell, markdown_text

WIDE = "\uff1d\uff0b\uff0d\uff20"  # the same signs in full width


@pytest.mark.parametrize(
    "text",
    [
        *('=HYPERLINK("http://x")', "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "-", "--1"),
        *("\t=1", "\r=1", "\n=1", " =1+1", "a;=1+1", "a;\t=1", "a\t=1", "a\n@x"),
        *(f"{sign}1" for sign in WIDE),
    ],
)
def test_a_formula_is_a_text(text: str) -> None:
    written = csv_cell(text)
    assert written.replace("'", "").split() == text.replace("'", "").split()
    assert not {"\t", "\r", "\n"} & set(written)
    for cell in written.split(";"):
        assert not cell.strip().startswith((*"=+-@", *WIDE)), written


@pytest.mark.parametrize(
    "value",
    [-0.5, 3, None, True, "-0.5", "+3", "-1e-5", "-inf", "nan", "a=b", "lr -1", "", "vapo-1"],
)
def test_numbers_and_plain_names_stay(value: Any) -> None:
    assert csv_cell(value) == value


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("[x](javascript:alert(1))", r"[x\](javascript:alert(1))"),
        ("![x](http://a/b.png)", r"\![x\](http:\//a/b.png)"),
        ("[x][y]", r"[x\][y]"),
        ("[x]: http://a", r"[x\]: http:\//a"),
        ("<img src=x onerror=y>", r"\<img src=x onerror=y>"),
        ("<!-- gone", r"\<!-- gone"),
        ("<https://a>", r"\<https:\//a>"),
        ("www.a.de WWW.a.de me@a.de", r"www\.a.de WWW\.a.de me\@a.de"),
        ("`code` **bold** a\\b", r"\`code\` \*\*bold\*\* a\\b"),
        ("# title\n- list\r\n\n| a |", r"\# title - list | a |"),
        ("~~~", r"\~\~\~"),
        ("vapo_seed0 62.5 [60.1, -64.9] (2; p 0.1)", "vapo_seed0 62.5 [60.1, -64.9] (2; p 0.1)"),
    ],
)
def test_markdown_shows_a_text_as_it_is(text: str, written: str) -> None:
    assert markdown_text(text) == written
    assert markdown_cell(text) == written.replace("|", r"\|")


HOSTILE = '=HYPERLINK("http://x") [x](javascript:y) <img onerror=z> a|b'


def test_reports_have_no_formulas_links_or_html() -> None:
    found = collection({HOSTILE: {0: 0.4, 1: 0.3}, "all": {0: 0.5, 1: 0.5}}, {}, "all")
    curves = [curve.__class__(**{**vars(curve), "critic": HOSTILE}) for curve in CURVES]
    table = critics.summarize(curves, reference=HOSTILE)
    tables = [as_csv(make_table(found)), critics.as_csv(table)]
    for text in tables:
        rows = list(csv.DictReader(io.StringIO(text)))
        assert f"'{HOSTILE}" in rows[0].values() or f"'{HOSTILE}" in rows[-1].values()
        assert not any(cell.startswith("=") for row in rows for cell in row.values())
    pages = [
        markdown(found, make_table(found)),
        critics.markdown(table, reference=HOSTILE),
        gates.markdown(FIGURES, [], about=[HOSTILE]),
    ]
    for text in pages:
        assert r"[x\](javascript:y) \<img onerror=z>" in text
        assert "](java" not in text.replace(r"\](", "")
        assert "<img" not in text.replace(r"\<", "")
