"""Names that are not UTF-8 are one error, before anything is recorded under them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import vapo
from tests.config.fits import MINIMAL, PROCEDURAL, fit_config, write
from vapo.cli import main
from vapo.errors import UserError

BYTES = os.fsdecode(b"\xff")  # as the shell's arguments, listed files and variables come


@pytest.mark.parametrize(
    ("argv", "place"),
    [
        (["fit", "--config", "conf/vapo.yaml", f"output_dir=runs/{BYTES}"], "4, 'output_dir',"),
        (["fit", "--config", "conf/vapo.yaml", "tracking.run_name", BYTES], "5"),
        (["fit", "--config", f"{BYTES}.yaml"], "3"),
        (["inspect", f"rows{BYTES}.jsonl"], "2"),
        (["export", f"--output={BYTES}"], "2, '--output',"),
        ([BYTES], "1"),
        (["fit", f"{BYTES}=1"], r"2, '\udcff',"),
    ],
)
def test_an_argument_of_any_command(
    argv: list[str], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vapo: command line: argument {place} is not text in UTF-8: its ")


@pytest.mark.parametrize("text", [BYTES, "a\ud800"])
@pytest.mark.parametrize(
    "key",
    [
        *("output_dir", "actor.path", "data.train.path", "tracking.run_name", "tracking.uri"),
        *("tracking.tags.a", "critic.init", "data.prompt_template", "data.train.prompt_column"),
    ],
)
def test_a_text_of_a_config(tmp_path: Path, key: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        vapo.load_config(write(tmp_path, MINIMAL), overrides={key: text})
    place = f"{key} is not text in UTF-8: its character {len(text)} is "
    assert str(caught.value).startswith(place)


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("tracking.tags", {BYTES: "a"}, "tracking.tags"),
        ("data.train.options", {"a": [{"b": BYTES}]}, "data.train.options.a.b"),
        ("data.train.options", {"a": {BYTES: 1}}, "data.train.options.a"),
        ("critic.frozen", [BYTES], "critic.frozen"),
    ],
)
def test_a_text_or_a_name_deep_in_a_value(
    tmp_path: Path, key: str, value: object, place: str
) -> None:
    source = dict(override.split("=") for override in PROCEDURAL)
    with pytest.raises(UserError, match=f"{place} is not text in UTF-8"):
        vapo.load_config(write(tmp_path, MINIMAL), overrides={**source, key: value})


def test_a_variable_of_the_environment_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAPO_TEST_FOLDER", f"hidden{BYTES}")
    with pytest.raises(UserError, match="output_dir is not text in UTF-8") as caught:
        fit_config(tmp_path, "output_dir=${oc.env:VAPO_TEST_FOLDER}")
    assert "hidden" not in str(caught.value)


def test_the_name_of_a_file_and_of_the_folder_that_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / BYTES).mkdir()
    with pytest.raises(UserError, match="--config: the file's name is not text in UTF-8"):
        vapo.load_config(write(folder, MINIMAL))
    write(tmp_path, MINIMAL)
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="the name of the folder of the command line is not text"):
        vapo.load_config("../overlay.yaml")
