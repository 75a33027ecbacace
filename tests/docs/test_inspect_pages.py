"""What the pages on `vapo inspect` show: the code runs, and the gallery's pages are its own."""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.config.fits import ROOT
from tests.diagnostics.value_page.reading import page_json
from tests.docs.pages import named_files
from vapo.diagnostics.value_page.template import fill_page
from vapo.studies.inspection.page import FIGURE_TEXTS
from vapo.studies.inspection.remarks import INSPECT_ROWS

GALLERY = ROOT / "docs/gallery"
ROLLOUTS = ROOT / "tests/studies/inspection/fixtures/checked_steps.jsonl"
NAMED = {  # what each page of a broken critic must say first
    "untrained": "A value head that was never trained",
    "off_by_one": "Values are off by one: each value has already seen its own token",
    "wrong_scale": "Values and rewards are in different scales",
    "prompt_mean": "The critic is the prompt's mean",
    "reads_length": "The critic reads length",
}


class Recorded:
    """A stand-in for a run of Weights & Biases."""

    def __init__(self) -> None:
        self.logged: dict[str, Any] = {}

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None: ...

    def log(self, figures: dict[str, Any]) -> None:
        self.logged |= figures


def test_the_code_for_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, wandb = Recorded(), ModuleType("wandb")
    wandb.init = lambda **_: run  # type: ignore[attr-defined]
    wandb.Html = str  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "outputs/rollouts").mkdir(parents=True)
    (tmp_path / "outputs/rollouts/rows.jsonl").write_bytes(ROLLOUTS.read_bytes())
    monkeypatch.chdir(tmp_path)
    exec(compile(dict(named_files())["log_inspection.py"], "log_inspection.py", "exec"), {})
    assert run.logged["inspect/page"].startswith("<!doctype html>")
    assert run.logged["inspect/num_wrong"] == 0
    assert 0 < run.logged["inspect/explained_variance"] < 1


def test_the_gallery_s_pages_exist_and_are_listed() -> None:
    text = (ROOT / "docs/gallery.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\(gallery/(\w+\.html)\)", text))
    assert listed == {path.name for path in GALLERY.glob("*.html")}
    assert sum(path.stat().st_size for path in GALLERY.glob("*.html")) < 1_200_000


@pytest.mark.parametrize("path", sorted(GALLERY.glob("*.html")), ids=lambda path: path.stem)
def test_a_page_of_the_gallery_is_what_the_code_writes_today(path: Path) -> None:
    """Its script and style, and the names of its figures; if not, experiments/inspect/gallery.py
    writes it again."""
    page = path.read_text(encoding="utf-8")
    data, own = page_json(page), files("vapo.studies.inspection")
    script, style = (own.joinpath(f"inspection.{end}").read_text("utf-8") for end in ("js", "css"))
    assert fill_page(data, script=script, style=style) == page
    tables = {table["title"]: table["rows"] for table in data["report"]["tables"]}
    if data["report"]["tiles"][-1]["label"] == "slope":  # a page with values
        names = [name for name, _ in tables["All figures, with 95 % intervals over prompts"]]
        assert names[: len(FIGURE_TEXTS)] == list(FIGURE_TEXTS.values())
        assert "at shifts -1, 0, +1" in names[len(FIGURE_TEXTS)]
    for remark in data["report"]["remarks"]:
        assert remark["row"].rpartition('row "')[2].removesuffix('"') in INSPECT_ROWS.values()


@pytest.mark.parametrize("name", [*NAMED, "sound"])
def test_a_page_of_the_gallery_names_what_was_broken(name: str) -> None:
    page = (GALLERY / f"{name}.html").read_text(encoding="utf-8")
    remarks = page_json(page)["report"]["remarks"]
    wrong = [remark["title"] for remark in remarks if remark["severity"] == "wrong"]
    assert wrong == ([NAMED[name]] if name in NAMED else [])
