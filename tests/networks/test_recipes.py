"""conf/recipes/: each file alone is a whole config, and its header says what it resolves to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.config.fits import ROOT
from tests.docs.pages import commands
from vapo import cli
from vapo.config import FitConfig, resolve
from vapo.config.extends import read_files
from vapo.config.loading import compose
from vapo.config.other_models import check_learning_rates
from vapo.config.written import flatten

RECIPES = sorted((ROOT / "conf/recipes").glob("*.yaml"))
SCALES = sorted((ROOT / "conf/scale").glob("*.yaml"))
COMMANDS = [command for command in commands() if command.program == "vapo"]
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


PAGE = (ROOT / "docs/recipes.md").read_text()
FILES = [
    [cell.strip() for cell in line.split("|")[3:-1]]
    for line in PAGE.partition("## The files")[2].partition("\n## ")[0].splitlines()
    if line.startswith("| ") and "`" in line
]
"""The page's rows: the file, then training step, peak, disk and seconds."""


def figures(recipe: Path) -> tuple[str, ...]:
    """The recipe's training step, peak and disk, in GiB, as the page has them."""
    (row,) = (cells for cells in FILES if cells[0] == f"`conf/recipes/{recipe.name}`")
    return tuple(cell.split()[0] for cell in row[1:4])


def header(recipe: Path) -> str:
    """The comment at the top, as one line with its continuations joined."""
    lines = []
    for line in recipe.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines).replace("\\ ", "")


@recipes
def test_one_file_is_a_whole_config_and_not_the_default_tasks(recipe: Path) -> None:
    config = compose(FitConfig, [recipe], []).config
    resolve(config)
    check_learning_rates(config)
    files = {Path(layer.name).resolve() for layer in read_files([recipe])}
    assert ROOT / "conf/vapo.yaml" not in files
    assert config.output_dir != FitConfig.output_dir


@recipes
def test_the_values_of_its_header_are_those_of_the_config(recipe: Path) -> None:
    told = re.search(r"Values: ((?:[a-z_.]+=\S+ ?)+)", header(recipe))
    assert told is not None
    tree = flatten(compose(FitConfig, [recipe], []).config)
    values = dict(pair.split("=") for pair in told[1].split())
    assert len(values) >= 5
    for key, text in values.items():
        found: Any = tree[key]
        assert (float(text) if isinstance(found, (int, float)) else text) == found, key


@pytest.mark.parametrize("recipe", [*RECIPES, *SCALES], ids=lambda path: path.stem)
def test_the_simulated_step_of_its_header_is_that_of_the_page(recipe: Path) -> None:
    """The page's table is held by the night tests of the simulation."""
    _, _, table = PAGE.partition("| recipe | GPUs | actor update | critic update |")
    row = next(line for line in table.splitlines() if line.startswith(f"| `{recipe.stem}`"))
    simulated = [cell.partition(",")[0].strip() for cell in row.split("|")[3:6]]
    largest = max(simulated, key=float)
    assert f"Simulated: {largest} GiB in its largest training step" in header(recipe)
    if recipe in RECIPES:
        assert figures(recipe)[0] == largest


def test_each_figure_says_where_it_comes_from() -> None:
    assert len(FILES) > len(RECIPES)
    for _, step, peak, disk, seconds in FILES:
        assert all(re.search(r" \([mse]\)$", cell) for cell in (step, peak, disk))
        assert not seconds or re.search(r" \([mse]\)$", seconds)


@recipes
def test_large_checkpoints_are_rare_and_keep_nobody_waiting(recipe: Path) -> None:
    disk_gib = float(figures(recipe)[2])
    checkpoints = compose(FitConfig, [recipe], []).config.checkpoints
    if disk_gib >= 10:
        assert checkpoints.every_n_iterations >= 10
    if disk_gib >= 50:
        assert checkpoints.every_n_iterations == 25
        assert checkpoints.save_in_background
        assert f"checkpoints: # of {disk_gib:.0f} GiB each" in "".join(
            layer.read_text() for layer in (recipe, *bases(recipe))
        )


def bases(recipe: Path) -> list[Path]:
    """The recipes that this one extends."""
    paths = [Path(layer.name).resolve() for layer in read_files([recipe])]
    return [path for path in paths if path.parent == recipe.parent and path != recipe]


@pytest.mark.night  # the arithmetic itself: tests/studies/estimate
@recipes
def test_the_estimate_of_its_header_is_what_the_command_prints(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = re.search(
        r"Estimated: ([\d.]+) GiB(?: on each GPU)?(?:, ([\d.]+) hours)?, by", header(recipe)
    )
    assert told is not None
    gib, hours = told.groups()
    page = str(recipe.relative_to(ROOT))
    (command,) = (c for c in COMMANDS if c.page == page and c.words[0] == "estimate")
    assert page in command.words
    monkeypatch.chdir(ROOT)
    assert cli.main(list(command.words)) == 0
    printed = capsys.readouterr().out
    assert f"peak: {gib} GiB" in printed
    assert f"disk: {figures(recipe)[2]} GiB for a checkpoint" in printed
    assert "does not fit" not in printed
    assert ("in all:" in printed) == (hours is not None)
    if hours is not None:
        assert f"in all: {hours} h" in printed


OWN_MODELS = [
    ("SmolLM2-135M", "smollm2_135m", None),
    ("0.5 B", "qwen2.5_0.5b", 24),
    ("1.5 B", "qwen2.5_1.5b", 24),
    ("7 B", "qwen2.5_7b", 80),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "shape", "gib"), OWN_MODELS, ids=lambda value: str(value))
def test_the_rows_of_own_models_are_what_the_command_prints(
    model: str,
    shape: str,
    gib: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (row,) = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in PAGE.splitlines()
        if line.startswith(f"| {model} |") and "`vapo fit --model" in line
    )
    keys = re.findall(r"\b[a-z.]+=\w+", row[2])
    monkeypatch.chdir(ROOT)
    memory = [] if gib is None else ["--gpu_memory_gib", str(gib)]
    assert gib is None or f"1 x {gib} GB" == row[1]
    assert cli.main(["estimate", "--model", f"models/shapes/{shape}", *memory, *keys]) == 0
    printed = capsys.readouterr().out
    totals = re.search(r"^total +(.*)$", printed, re.MULTILINE)
    assert totals is not None
    _, _, *training = totals[1].split()
    step, peak, disk = (cell.split()[0] for cell in row[3:6])
    assert max(map(float, training)) == float(step)
    assert f"peak: {peak} GiB" in printed
    size = re.search(r"disk: ([\d.]+) ([GM])iB for a checkpoint", printed)
    assert size is not None
    assert float(disk) == pytest.approx(float(size[1]) / (1 if size[2] == "G" else 1024), abs=0.005)


def test_what_has_not_run_on_a_gpu_is_said_in_one_place() -> None:
    table = (ROOT / "conf/recipes/README.md").read_text()
    assert {path.name for path in RECIPES} == set(re.findall(r"`(\S+\.yaml)`", table))
    for recipe in RECIPES:
        (row,) = (line for line in table.splitlines() if f"`{recipe.name}`" in line)
        assert ("not run" in row.lower()) == ("Not run" in recipe.read_text())
