"""Every metric that a page, a config or the code names is one that runs record, by its one name."""

from __future__ import annotations

import re
from pathlib import Path

from tests.config.fits import ROOT
from tests.docs.pages import CONFIGS, PAGES
from tests.tracking.metric_docs import documented_keys

KEYS = documented_keys()
GROUPS = sorted({key.partition("/")[0] for key in KEYS})
NAME = re.compile(rf"(?<![\w/.$-])(?:{'|'.join(GROUPS)})/[a-z]\w*(?![\w/-]|\.\w)")
PLACE = r"([\w/]+)"
EXAMPLES = {"sweep/a_b", "sweep/without"}  # of rows' names, in docs/metrics.md
OLDER = ROOT / "vapo/tracking/metric_names.py"


def unknown(paths: list[Path], *, known: set[str]) -> dict[str, set[str]]:
    """Page -> names that are none, nor the beginning of one where `_` or a brace follows."""
    found = {}
    for path in paths:
        names = set(NAME.findall(path.read_text(encoding="utf-8"))) - known
        parts = {n for n in names if n.endswith("_") and any(key.startswith(n) for key in known)}
        if names - parts:
            found[str(path.relative_to(ROOT))] = names - parts
    return found


def test_pages_and_configs_name_metrics_that_are_recorded() -> None:
    older = ROOT / "CHANGELOG.md"  # has the old names, too
    tutorial = ROOT / "docs/tutorial.ipynb"
    pages = [page for page in [*PAGES, *CONFIGS, tutorial] if page != older]
    assert sum(len(NAME.findall(page.read_text())) for page in pages) > 300
    assert not unknown(pages, known=KEYS | EXAMPLES)


def test_code_names_metrics_that_are_documented() -> None:
    """Also the package's messages, and the figures and tables of experiments."""
    files = [*(ROOT / "vapo").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
    files = [file for file in files if file != OLDER]
    joined = {key.rpartition("_")[0] for key in KEYS}  # to which `_mean`, `_max` ... is joined
    assert not unknown(files, known=KEYS | joined | {"eval/x"})


def test_every_documented_metric_is_made_somewhere() -> None:
    """As a text of the package, or as an f-string's text with its words in the places."""
    code = "\n".join(file.read_text() for file in (ROOT / "vapo").rglob("*.py") if file != OLDER)
    texts = set(re.findall(r'"([^"\n]*)"', code))
    words = texts | set(re.findall(r"\w+", code)) | {"NAME"}
    made = {
        re.sub(r"\\\{.*?\\\}", PLACE.replace("\\", r"\\"), re.escape(text))
        for text in re.findall(r'f"([^"\n]*)"', code)
        if re.fullmatch(r"[\w/{}.:]+", text)
    }
    patterns = [re.compile(pattern) for pattern in made if pattern != PLACE]

    def is_made(text: str, *, within: bool = False) -> bool:
        """A place is filled by a word, or by an f-string whose places are filled by words."""
        return any(
            all(is_word(group) or (not within and is_made(group, within=True)) for group in found)
            for pattern in patterns
            if (match := pattern.fullmatch(text))
            if re.search("[a-z]", pattern.pattern.replace(PLACE, "")) or "/" in match[1]
            if (found := match.groups())
        )

    def is_word(text: str) -> bool:
        return text in (texts if "/" in text else words)

    general = {key.replace("eval_NAME/", "eval/") for key in KEYS}
    lost = [key for key in general - texts if not is_made(key)]
    assert not lost, "docs/metrics.md has rows of metrics that nothing records"


def test_a_name_is_told_from_a_path() -> None:
    text = "`rollout/truncated_fraction`, conf/eval/x.yaml, runs/critic/0, time/scoring_s."
    assert NAME.findall(text) == ["rollout/truncated_fraction", "time/scoring_s"]
