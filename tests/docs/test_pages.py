"""What the documentation says to type is understood by the commands, and what it names exists."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs.hooks.migration import sections
from tests.config.fits import ROOT
from tests.docs.pages import CONFIGS, PAGES, Command, commands, named_files, spans
from vapo import cli
from vapo.commands.command_table import COMMANDS as TABLE
from vapo.commands.own_model import OwnModel
from vapo.config import FitConfig, RewardModelConfig, SftConfig
from vapo.config.checkpoints import FREE_KEYS
from vapo.config.options import describe, is_key
from vapo.system.installation import __version__

COMMANDS = commands()
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
SYNOPSIS = re.compile(r"[\[|]")  # `[--flag A|B]`


def typed(program: str) -> list[Command]:
    return [c for c in COMMANDS if c.program == program and not SYNOPSIS.search(" ".join(c.words))]


def test_the_pages_are_read() -> None:
    """The tests below say something: known commands of each kind of block are found."""
    found = {str(command) for command in COMMANDS}
    assert "README.md: make fit" in found
    assert "docs/algorithms.md: vapo fit --config conf/vapo.yaml --print_config" in found
    assert "docs/resuming.md: vapo fit --config conf/vapo.yaml checkpoints.resume=auto" in found
    assert "docs/rollouts.md: vapo fit --config conf/vapo.yaml rollouts.engine=vllm" in found
    assert any(line.startswith("docs/servers.md: vapo serve --config") for line in found)
    assert "conf/recipes/smollm2_cpu.yaml: vapo fit --config conf/recipes/smollm2_cpu.yaml" in found
    scaling = [str(c) for c in typed("vapo") if "trainer.num_nodes=2" in c.words]
    assert len(scaling) == 2, "torchrun's and srun's"


ONCE = {command.words: command for command in reversed(typed("vapo"))}  # of several pages


@pytest.mark.slow
@pytest.mark.parametrize("command", ONCE.values(), ids=str)
def test_a_command_is_understood(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Its config files are there, its keys and values are valid."""
    for name in ("conf", "models", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, text in named_files():
        (tmp_path / name).write_text(text)
    (tmp_path / "my_overlay.yaml").write_text("seed: 1\n")
    (tmp_path / "RUN_DIR").mkdir()
    (tmp_path / "RUN_DIR" / "config.yaml").write_text((ROOT / "conf" / "vapo.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    ran: list[str] = []

    def load(name: str, *_: object, **__: object) -> Callable[..., object]:
        return lambda *args, **kwargs: ran.append(name)

    monkeypatch.setattr(cli, "_load_command", load)
    monkeypatch.setattr("vapo.commands.early_checks.check_early", lambda *_: None)
    if "--model" in command.words:  # its model and problems are the reader's
        chosen = OwnModel([Path("conf/vapo.yaml")], [], "")
        monkeypatch.setattr("vapo.commands.own_model.own_model", lambda *_, **__: chosen)
    code = cli.main([word for word in command.words if word != "..."])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert len(ran) == 1 or "--print_config" in command.words


@pytest.mark.parametrize("command", typed("make"), ids=str)
def test_a_target_is_there(command: Command) -> None:
    assert {word for word in command.words if "=" not in word} <= TARGETS


def flags_of(name: str, capsys: Any) -> set[str]:
    cli.main([name, "--help"])
    return set(re.findall(r"--[a-z_-]+", capsys.readouterr().out))


def test_commands_in_running_text(capsys: Any) -> None:
    """`vapo NAME --flag ...` between backquotes: the name and the flags."""
    known = {name: flags_of(name, capsys) for name in TABLE}
    seen = 0
    for page, span in spans():
        if match := re.match(r"vapo ([a-z-]+)(.*)", span):
            name, rest = match.groups()
            assert name in known, (page, span)
            flags = {f for f in re.findall(r"--[a-z_.-]+", rest) if "." not in f}
            assert flags <= known[name], (page, span)
            seen += 1
        elif span.startswith("make "):
            assert set(re.findall(r"^make ([a-z0-9-]+)", span)) <= TARGETS, (page, span)
    assert seen > 20


def test_config_keys_in_running_text() -> None:
    """A dotted name that begins with a block of the config is a key of it, or the start of one."""
    schemas = [describe(schema) for schema in (FitConfig, SftConfig, RewardModelConfig)]
    blocks = {key.partition(".")[0] for entries in schemas for key in entries if "." in key}
    of_verl = {key for part in sections() for row in part.rows for key in row.verl}
    known = {key for entries in schemas for key in entries} | OTHERS | of_verl
    unknown = defaultdict(set)
    seen = 0
    for page, span in spans():
        for key in re.findall(r"(?<![\w./-])([a-z_]+(?:\.[a-zA-Z_]+)+)(?![\w./(*]|$\()", span):
            if key.partition(".")[0] not in blocks or key.endswith(FILE_ENDINGS):
                continue
            seen += 1
            if not any(is_key(key, entries) for entries in schemas) and key not in known:
                unknown[page].add(key)
    assert not unknown
    assert seen > 100


def test_the_page_on_resuming_names_the_keys_that_may_change() -> None:
    named = {span for page, span in spans() if page == "docs/resuming.md"}
    assert {key for key in FREE_KEYS if not key.startswith("trainer.")} <= named


def test_every_key_for_a_user_of_trl_exists() -> None:
    """Also the keys without a dot, and the blocks; `none` stands where there is nothing alike."""
    page = (ROOT / "docs/ppo_after_trl.md").read_text()
    rows = re.findall(r"^\| `[^|]*\| ([^|]*) \|", page.split("## Key by key")[1], re.MULTILINE)
    assert len(rows) > 30
    for ours in rows:
        keys = [span.partition("=")[0] for span in re.findall(r"`([^`]+)`", ours)]
        assert keys or ours == "none", ours
        assert all(is_key(key, describe(FitConfig)) for key in keys), ours


OTHERS = {  # Lightning's, verl's, a function of ours, no key by docs/why.md, and old names
    "trainer.checkpoint_every_n_iterations",
    "algorithm.value_clip",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "training.epochs",
    "trainer.global_step",
    "rewards.overlong.soft_overlong_punishment",
}
FILE_ENDINGS = (".py", ".yaml", ".md", ".json", ".jsonl", ".html")
MADE = ("models/smollm2_135m", "models/worked_sums")  # by commands of docs/models.md


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target or target.startswith("#"):
            continue
        path, _, anchor = target.partition("#")
        other = page.parent / path
        assert other.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
            made = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in made, target


def test_paths_in_running_text_exist() -> None:
    """`vapo/x.py`, `docs/y.md`, `conf/...` between backquotes, and named in the configs."""
    roots = ("vapo/", "docs/", "conf/", "tests/", "experiments/", "models/")
    named = [(page, span) for page, span in spans()]
    named += [
        (str(config.relative_to(ROOT)), word)
        for config in CONFIGS
        for word in re.findall(r"(?:docs|conf|experiments|tests)/[\w./-]+\w", config.read_text())
    ]
    seen = 0
    for page, span in named:
        path = span.partition("::")[0].rstrip("/")
        if not span.startswith(roots) or re.search(r"[\s*{<$]|NAME|\.\.\.", span):
            continue
        seen += 1
        assert (ROOT / path).exists() or path.startswith(MADE), (page, span)
    assert seen > 50


def test_the_version_is_the_same_everywhere() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__
    assert f"vapo-{__version__}-py3" in (ROOT / "README.md").read_text()
