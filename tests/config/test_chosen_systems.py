"""Two files that choose different systems are an error that names both."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from tests.config.fits import MINIMAL, ROOT, write
from tests.systems import CONF, SYSTEMS
from vapo.cli import main
from vapo.config import FitConfig
from vapo.config.chosen_systems import check_one_system
from vapo.config.loading import load_config
from vapo.errors import UserError

BASE = ROOT / "conf/vapo.yaml"
GRPO, HL_GAUSS = (CONF / f"algorithm/{name}.yaml" for name in ("grpo", "hl_gauss"))


def refused(*files: Path, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(UserError) as caught:
        check_one_system(load_config(FitConfig, files, overrides).sources)
    return str(caught.value)


@pytest.mark.parametrize("files", permutations((GRPO, HL_GAUSS)), ids=lambda f: f[0].stem)
@pytest.mark.parametrize("base", [(BASE,), ()])
def test_two_presets_in_either_order(files: tuple[Path, Path], base: tuple[Path, ...]) -> None:
    needed = () if base else ("actor.path=a", "data.train.path=b")
    message = refused(*base, *files, overrides=needed)
    first, second = files
    assert message.startswith(f"{second}:")
    assert f"tracking.tags.system is '{second.stem}', and {first}:" in message
    assert "Leave one of the two files out" in message


def test_every_preset_says_which_system_it_is() -> None:
    for system in SYSTEMS:
        if system != "grpo":
            assert "a run has one system" in refused(BASE, GRPO, CONF / f"algorithm/{system}.yaml")


def test_a_recipe_that_extends_a_preset_has_its_system() -> None:
    recipe = CONF / "recipes/sao_environment_qwen2.5_0.5b.yaml"
    assert "sao.yaml:16 says 'sao'" in refused(recipe, GRPO)


def test_two_files_of_one_s_own_without_a_name(tmp_path: Path) -> None:
    base = write(tmp_path, MINIMAL + "algorithm: {advantage_estimator: gae}", "base.yaml")
    groups = "algorithm: {advantage_estimator: group_mean}"
    off = ["value_pretraining", "decoupled_gae", "length_adaptive_gae"]
    groups += f"\ncomponents: {{{', '.join(f'{name}: {{enabled: false}}' for name in off)}}}"
    first = write(tmp_path, groups, "first.yaml")
    second = write(tmp_path, "algorithm: {advantage_estimator: leave_one_out}", "second.yaml")
    assert load_config(FitConfig, [base, first], []).algorithm.advantage_estimator == "group_mean"
    message = refused(base, first, second)
    assert f"{second}:1: algorithm.advantage_estimator is 'leave_one_out'" in message
    assert f"{first}:1 says 'group_mean'" in message


def test_what_is_no_contradiction(tmp_path: Path) -> None:
    more = write(tmp_path, "seed: 3\nalgorithm: {eps_low: 0.1}", "more.yaml")
    own = write(
        tmp_path,
        f"extends: {GRPO}\nalgorithm: {{advantage_estimator: group_mean}}\n"
        "tracking: {tags: {system: mine}}",
        "own.yaml",
    )
    typed = ["algorithm.advantage_estimator=leave_one_out", "tracking.tags.system=mine"]
    for files, overrides in (
        ((BASE, GRPO, GRPO), []),
        ((BASE, GRPO, more), []),
        ((BASE, own), []),
        ((BASE, GRPO, own), []),
        ((BASE, GRPO), typed),
    ):
        config = load_config(FitConfig, files, overrides)
        check_one_system(config.sources)
        assert config.tracking.tags["system"] in ("grpo", "mine")


@pytest.mark.parametrize("more", [["--print_config"], []])
@pytest.mark.parametrize("files", permutations((GRPO, HL_GAUSS)), ids=lambda f: f[0].stem)
def test_every_command_refuses_them(
    files: tuple[Path, Path],
    more: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    named = [word for file in (BASE, *files) for word in ("--config", str(file))]
    assert main(["validate", *named, *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(str(file) in line for file in files)
    assert ("critic.loss has no effect" in line) == (files[1] is GRPO), "the first sign of it"
