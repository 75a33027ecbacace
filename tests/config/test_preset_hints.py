"""What is said of a shipped preset that is given as a value, or without what it is laid over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import ROOT, write
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.errors import UserError


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm=grpo", "grpo is a file: --config conf/vapo.yaml --config conf/algorithm/grpo."),
        ("critic=probe", "probe is a file: --config conf/vapo.yaml --config conf/algorithm/probe"),
        ("trainer=one_gpu", "--config conf/data/gsm8k.yaml --config conf/scale/one_gpu.yaml actor"),
        ("data=gsm8k", "gsm8k is a file: --config conf/data/gsm8k.yaml actor.path=MODEL critic.in"),
        ("algorithm=nothing", "got 'nothing'; give keys below it, or leave it out"),
        ("algorithm=../x", "give keys below it, or leave it out"),
        ("algorithm=7", "give keys below it, or leave it out"),
    ],
)
def test_a_preset_in_place_of_a_block(override: str, said: str) -> None:
    with pytest.raises(UserError, match="is a block of keys, got") as error:
        load_config(FitConfig, [Path("conf/vapo.yaml")], [override])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("preset", "said"),
    [
        ("algorithm/grpo", "--config conf/vapo.yaml --config conf/algorithm/grpo.yaml"),
        ("scale/one_gpu", "--config conf/data/gsm8k.yaml --config conf/scale/one_gpu.yaml actor."),
    ],
)
def test_a_preset_without_its_base(preset: str, said: str) -> None:
    with pytest.raises(UserError, match="is a preset, which is laid over a base: ") as error:
        load_config(FitConfig, [Path(f"conf/{preset}.yaml")], [])
    assert said in str(error.value)


def test_a_file_of_ones_own_that_lacks_a_key_is_no_preset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be set") as error:
        load_config(FitConfig, [write(tmp_path, "seed: 1")], [])
    assert "preset" not in str(error.value)


def test_a_file_in_place_of_a_function_names_its_functions(tmp_path: Path) -> None:
    file = write(tmp_path, "def _x(): 0\ndef score(a): 0\nasync def other(a): 0\n", "mine.py")
    own = ["rewards.verifier=python", f"rewards.function={file}"]
    with pytest.raises(UserError) as error:
        load_config(FitConfig, [Path("conf/vapo.yaml")], own)
    said = f"is a file: name its function too, as {file}:score (it has score, other)"
    assert said in str(error.value)
    file.write_text("def (")
    with pytest.raises(UserError, match="is not of the form"):
        load_config(FitConfig, [Path("conf/vapo.yaml")], own)


def test_a_shipped_config_is_used_from_any_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its paths are beside its folder conf, unless the current folder has them, too."""
    monkeypatch.chdir(tmp_path)
    path = load_config(FitConfig, [ROOT / "conf/vapo.yaml"], []).actor.path
    assert not Path(path).is_absolute()
    policy = load_config(FitConfig, [ROOT / "conf/vapo.yaml"], ["actor.path=models/x"])
    assert policy.actor.path == "models/x"
    assert Path(path).resolve() == (ROOT / "models/checked_steps/policy").resolve()
    (tmp_path / "models/checked_steps/policy").mkdir(parents=True)
    here = load_config(FitConfig, [ROOT / "conf/vapo.yaml"], []).actor.path
    assert here == "models/checked_steps/policy"
