"""The page that says what this package has and lacks, against what the config takes."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.config.fits import ROOT
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.errors import UserError

PAGE = ROOT / "docs" / "why.md"
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| `([^|`]+)` \|$", re.MULTILINE)
HAS = PAGE.read_text().partition("## What it has, and what it lacks")[2].partition("\n## ")[0]
ROWS = [match.groups() for match in ROW.finditer(HAS)]
OLD = {  # what the page said until these existed, and another check of the test itself
    "multi-turn": ("no", "environment.kind=function environment.function=my_file.py:MyClass"),
    "tools": ("no", "environment.kind=verifiers environment.id=my-environment"),
    "two iterations ahead": ("no", "training.max_staleness=2"),
    "SGLang": ("yes", "rollouts.engine=sglang"),
}


def is_true(answer: str, setting: str) -> bool:
    """Whether a setting is valid where the page says yes, and an error where it says no."""
    has = answer.startswith("yes")
    assert has or answer.startswith(("no", "only with")), answer
    try:
        load_config(FitConfig, [ROOT / "conf" / "vapo.yaml"], shlex.split(setting))
    except UserError:
        return not has
    return has


@pytest.mark.parametrize(("what", "answer", "setting"), ROWS, ids=[row[0] for row in ROWS])
def test_a_claim_is_what_the_config_takes(what: str, answer: str, setting: str) -> None:
    assert is_true(answer, setting), f"{what}: {answer}"


@pytest.mark.parametrize(("answer", "setting"), OLD.values(), ids=OLD)
def test_a_claim_that_is_false_is_found(answer: str, setting: str) -> None:
    assert not is_true(answer, setting)


def test_no_other_place_of_the_page_denies_what_the_table_has() -> None:
    """The other tables' rows on the same subjects say no nowhere in the column of this package."""
    assert len(ROWS) > 12
    text = PAGE.read_text()
    (choose,) = re.findall(r"^\| (multi-turn tasks with tools.*) \|$", text, re.MULTILINE)
    assert "`vapo` has none" not in choose
    beside = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", text.partition("side by side")[2], re.M))
    assert beside["multi-turn and tools"].startswith("yes")
    assert beside["asynchronous training"].startswith("as many iterations")
