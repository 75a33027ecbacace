"""`extends`: what a file builds on lies below it, once, wherever the file is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.config.fits import MINIMAL, write
from vapo.config import FitConfig
from vapo.config.extends import read_files
from vapo.config.loading import load_config
from vapo.errors import UserError


def seed_and_gamma(*files: Path) -> tuple[int, float]:
    config = load_config(FitConfig, list(files), [])
    return config.seed, config.algorithm.gamma


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    return write(tmp_path, f"{MINIMAL}seed: 3\nalgorithm: {{gamma: 0.5}}\n", "below/base.yaml")


def test_a_file_lies_over_what_it_extends(tmp_path: Path, base: Path) -> None:
    over = write(tmp_path, "extends: below/base.yaml\nseed: 4\n", "over.yaml")
    assert seed_and_gamma(over) == (4, 0.5)


def test_paths_are_relative_to_the_file_and_not_to_the_current_folder(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside").mkdir()
    over = write(tmp_path, "extends: ../below/base.yaml\n", "beside/over.yaml")
    monkeypatch.chdir(tmp_path / "below")
    assert seed_and_gamma(over) == (3, 0.5)
    assert seed_and_gamma(Path("../beside/over.yaml")) == (3, 0.5)


def test_of_several_the_last_wins_and_each_may_extend_others(tmp_path: Path, base: Path) -> None:
    write(tmp_path, "extends: below/base.yaml\nseed: 5\n", "a.yaml")
    write(tmp_path, "algorithm: {gamma: 0.7}\n", "b.yaml")
    over = write(tmp_path, "extends: [a.yaml, b.yaml]\n", "over.yaml")
    assert seed_and_gamma(over) == (5, 0.7)


def test_a_file_that_two_extend_is_laid_once(tmp_path: Path, base: Path) -> None:
    """Else the second would take back what the first changed."""
    write(tmp_path, "extends: below/base.yaml\nseed: 5\n", "a.yaml")
    write(tmp_path, "extends: below/base.yaml\nalgorithm: {gamma: 0.7}\n", "b.yaml")
    over = write(tmp_path, "extends: [a.yaml, b.yaml]\n", "over.yaml")
    assert seed_and_gamma(over) == (5, 0.7)
    assert seed_and_gamma(base, tmp_path / "a.yaml", tmp_path / "b.yaml") == (5, 0.7)


def test_a_file_of_the_command_line_is_always_laid_where_it_is_named(
    tmp_path: Path, base: Path
) -> None:
    over = write(tmp_path, "extends: below/base.yaml\nseed: 4\n", "over.yaml")
    assert seed_and_gamma(base, over) == (4, 0.5)
    assert seed_and_gamma(over, base) == (3, 0.5)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("extends: below/bsae.yaml", "no such file: .*bsae.yaml .*did you mean .*base.yaml"),
        ("extends: 3", "expects the path of a YAML file, or a list of them, got 3"),
        ("extends: ['']", "expects the path of a YAML file, or a list of them, got ''"),
        ("extends: '${output_dir}.yaml'", "expects the path of a YAML file"),
        ("extends: {a: b}", "expects the path of a YAML file"),
        ("extends: below", ".*/below is a folder, give a YAML file"),
        ("extends: /dev/null", "/dev/null is a device or a pipe, give a YAML file"),
        (f"extends: {'x' * 300}.yaml", "'.*xxx.* cannot be read .File name too long"),
        (f"extends: gone/{'x' * 300}.yaml", "no such file: .*xxx"),
        ('extends: "a\\0b"', "a path cannot have a NUL character in it"),
        ("extends: below/base.yaml/more.yaml", "no such file: .*more.yaml"),
        ("extends: null", "expects the path of a YAML file, or a list of them, got null"),
    ],
)
def test_a_wrong_path_is_named_with_its_line(
    tmp_path: Path, base: Path, written: str, reason: str
) -> None:
    over = write(tmp_path, f"seed: 1\n{written}\n", "over.yaml")
    with pytest.raises(UserError, match=f"over.yaml:2: extends:? {reason}"):
        load_config(FitConfig, [over], [])


def test_a_path_may_begin_at_the_home_folder(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(base.parent))
    assert seed_and_gamma(write(tmp_path, "extends: ~/base.yaml\n", "over.yaml")) == (3, 0.5)


def test_a_block_cannot_extend(tmp_path: Path, base: Path) -> None:
    over = write(tmp_path, "seed: 1\ncomponents:\n  extends: below/base.yaml\n", "over.yaml")
    with pytest.raises(UserError, match=r"over.yaml:3: .*components.extends'; extends stands at"):
        load_config(FitConfig, [over], [])


def test_a_circle_is_an_error_that_shows_it(tmp_path: Path) -> None:
    first = write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "extends: c.yaml\n", "b.yaml")
    write(tmp_path, "extends: a.yaml\n", "c.yaml")
    with pytest.raises(UserError, match=r"c.yaml:1: .*cannot build on itself.*b.yaml.*c.yaml"):
        load_config(FitConfig, [first], [])


def test_an_error_in_an_extended_file_names_that_file(tmp_path: Path) -> None:
    write(tmp_path, "seed: 1\nsede: 2\n", "a.yaml")
    over = write(tmp_path, "extends: a.yaml\n", "over.yaml")
    with pytest.raises(UserError, match=r"a.yaml:2: unknown key 'sede'"):
        load_config(FitConfig, [over], [])


def test_it_is_no_key_of_the_command_line(base: Path) -> None:
    with pytest.raises(UserError, match="command line: extends is a key of a config file"):
        load_config(FitConfig, [base], ["extends=other.yaml"])


def chain(folder: Path, number: int) -> Path:
    """The last of so many files, each of which extends the one before it."""
    write(folder, "seed: 0\n", "0.yaml")
    for index in range(1, number):
        write(folder, f"extends: {index - 1}.yaml\nseed: {index}\n", f"{index}.yaml")
    return folder / f"{number - 1}.yaml"


def test_a_long_chain_is_read_and_a_longer_one_is_refused_at_once(tmp_path: Path) -> None:
    assert [layer.tree["seed"] for layer in read_files([chain(tmp_path, 100)])] == [*range(100)]
    began = time.process_time()
    with pytest.raises(UserError, match=r"900.yaml:1: extends: more than 100 files extend one an"):
        read_files([chain(tmp_path, 1000)])
    assert time.process_time() - began < 5


def test_many_files_beside_one_another_take_time_in_proportion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file's path is resolved a few times, not once for each other file."""
    chain(tmp_path, 90)
    resolved, resolve = list[Path](), Path.resolve

    def counted(path: Path) -> Path:
        resolved.append(path)
        return resolve(path)

    monkeypatch.setattr(Path, "resolve", counted)
    over = write(tmp_path, f"extends: {[f'{index}.yaml' for index in range(90)]}\n", "over.yaml")
    assert len(read_files([over])) == 91
    assert len(resolved) < 6 * 91
