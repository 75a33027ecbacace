"""The skills in the package: their commands run, and the configs and verdicts they name exist."""

from __future__ import annotations

import inspect
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.config.fits import ROOT
from tests.docs.test_commands_run import SMALLER
from tests.integration.commands import FEW_PROMPTS
from tests.tracking.ready_stores import ready_store
from vapo import cli
from vapo.config import FitConfig
from vapo.config.options import describe, is_key
from vapo.studies.inspection import critic_verdicts, verdicts

SKILLS = {path.parent.name: path for path in (ROOT / "vapo/.agents/skills").glob("*/SKILL.md")}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in SKILLS.items()}
NUM_COMMANDS = {"vapo": 5, "vapo-inspect": 4, "vapo-recipe": 5, "vapo-diagnose": 4}
FIXTURES = ROOT / "tests/studies/inspection/fixtures"
ROLLOUTS = {  # what the commands of vapo-inspect read
    "outputs/rollouts": FIXTURES / "verl",
    "outputs/completions": FIXTURES / "trl",
    "outputs/critic": ROOT / "models/checked_steps/reward_model",
    "rollouts.jsonl": FIXTURES / "checked_steps.jsonl",
    "rollouts.parquet": ROOT / "experiments/inspect/off_by_one.parquet",
}
skills = pytest.mark.parametrize("name", sorted(SKILLS))


def typed(name: str) -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", TEXTS[name], re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_the_package_has_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (pattern,) = project["tool"]["setuptools"]["package-data"]["vapo"]
    assert set((ROOT / "vapo").glob(pattern)) == set(SKILLS.values())
    assert SKILLS.keys() == NUM_COMMANDS.keys()
    table = TEXTS["vapo"].partition("## Which skill")[2]
    assert set(re.findall(r"\| `(vapo-\w+)` \|", table)) == SKILLS.keys() - {"vapo"}


@skills
def test_a_head_says_when_to_use_it(name: str) -> None:
    head = TEXTS[name].split("---\n")[1]
    assert re.findall(r"^name: (.*)$", head, re.MULTILINE) == [name]
    (description,) = re.findall(r"^description: (.*)$", head, re.MULTILINE)
    assert "Use it " in description
    assert len(description) <= 1024  # the format's limit


@skills
def test_the_configs_that_a_skill_names_exist(name: str) -> None:
    named = set(re.findall(r"conf/[\w./-]+\.yaml", TEXTS[name]))
    assert all((ROOT / path).is_file() for path in named)
    for others in re.findall(r"\(or (`\w+`(?:, `\w+`)*)\)", TEXTS[name]):
        for preset in re.findall(r"\w+", others):
            assert (ROOT / f"conf/algorithm/{preset}.yaml").is_file(), preset


def test_every_recipe_for_a_gpu_can_be_chosen() -> None:
    table = TEXTS["vapo-recipe"].partition("## 2.")[2].partition("## 3.")[0]
    recipes = {path.name for path in (ROOT / "conf/recipes").glob("*.yaml")}
    named = set(re.findall(r"`conf/recipes/(\S+\.yaml)`", table))
    assert recipes - named == {"paper_qwen2.5_32b.yaml", "smollm2_gpu.yaml"}


@skills
def test_the_keys_that_a_skill_names_exist(name: str) -> None:
    entries = describe(FitConfig)
    blocks = {key.partition(".")[0] for key in entries if "." in key}
    spans = re.findall(r"`([a-z_]+(?:\.[a-zA-Z_]+)+)(?:=[^`]*|: [^`]*)?`", TEXTS[name])
    keys = [key for key in spans if key.partition(".")[0] in blocks and key not in OF_VERL]
    assert keys or name in ("vapo", "vapo-inspect")
    assert not [key for key in keys if not is_key(key, entries)]


OF_VERL = {"trainer.rollout_data_dir"}


def test_the_verdicts_that_a_skill_names_are_said() -> None:
    source = "".join(map(inspect.getsource, (critic_verdicts, verdicts))).lower()
    table = TEXTS["vapo-inspect"].partition("## 3.")[2]
    rows = re.findall(r"^\| (.*?) \| ", table, re.MULTILINE)
    assert len(rows) == 7
    for verdict in rows[1:6]:  # behind the head
        assert verdict in source, verdict


def test_the_exit_codes_that_a_skill_names_are_those_of_the_page() -> None:
    page = (ROOT / "docs/resuming.md").read_text()
    known = set(re.findall(r"^\|.*?\| (\d+)\D*? \|$|^\| (\d+) \|", page, re.MULTILINE))
    table = TEXTS["vapo-diagnose"].partition("## 1.")[2].partition("## 2.")[0]
    rows = re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
    named = {code for row in rows for code in row.split(", ")}
    assert named <= {code for pair in known for code in pair}
    assert len(named) == 8


@pytest.mark.slow
@pytest.mark.usefixtures("unsent")
@skills
def test_the_commands_run_in_their_order(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for folder in ("conf", "models"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for path, source in ROLLOUTS.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / path)
    ready_store(tmp_path / "mlruns")
    monkeypatch.chdir(tmp_path)
    ran = 0
    for program, *words in typed(name):
        if program == "cd":
            monkeypatch.chdir(tmp_path / words[0])
            ready_store(Path("mlruns"))
            continue
        assert program == "vapo"
        assert cli.main(small(words)) == 0, (words, capsys.readouterr().err)
        ran += 1
    assert ran == NUM_COMMANDS[name]


def small(words: list[str]) -> list[str]:
    """The command on few prompts, with the newest run's folder; its own words win."""
    runs = sorted(Path("runs/vapo").glob("*/config.yaml"))
    words = [word.replace("RUN_DIR", str(runs[-1].parent)) if runs else word for word in words]
    extra = {"fit": [*SMALLER, *FEW_PROMPTS], "try": FEW_PROMPTS}
    extra["validate"] = extra["fit"]
    given = {word.partition("=")[0] for word in words if "=" in word}
    more = [item for item in extra.get(words[0], []) if item.partition("=")[0] not in given]
    return [*words, *more]
