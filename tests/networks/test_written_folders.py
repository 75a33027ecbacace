"""A model's folder is written whole, and never over something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_model import save_tiny_folder
from vapo.commands.early_checks import check_early
from vapo.config import RewardModelConfig, SftConfig
from vapo.config.loading import load_config
from vapo.errors import UserError
from vapo.networks.written_folders import check_new_folder, whole_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("models") / "model")


def linked(model: Path, tmp_path: Path) -> str:
    (tmp_path / "link").symlink_to(model)
    return str(tmp_path / "link")


def linked_above(model: Path, tmp_path: Path) -> str:
    (tmp_path / "link").symlink_to(model.parent)
    return str(tmp_path / "link" / model.name)


READ = [
    ("is the folder", lambda model, tmp_path: str(model)),
    ("is the folder", lambda model, tmp_path: f"{model}/"),
    ("is the folder", lambda model, tmp_path: f"{model}/."),
    ("is the folder", lambda model, tmp_path: f"{model.parent}/none/../{model.name}"),
    ("is the folder", lambda model, tmp_path: str(model).replace("/", "//")),
    ("is the folder", linked),
    ("is the folder", linked_above),
    ("lies in the folder", lambda model, tmp_path: f"{model}/new"),
    ("lies in the folder", lambda model, tmp_path: f"{linked(model, tmp_path)}/a/b"),
    ("is not empty", lambda model, tmp_path: str(model.parent)),
    ("is not empty", lambda model, tmp_path: f"{model}/.."),
]


@pytest.mark.parametrize(("problem", "path"), READ)
@pytest.mark.parametrize("command", ["sft", "reward-model"])
def test_what_a_command_reads_is_not_written_over(
    model: Path, tmp_path: Path, command: str, problem: str, path: Callable[[Path, Path], str]
) -> None:
    """By no path that leads there; and it is asked before anything is loaded."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    schema, key = (SftConfig, "model") if command == "sft" else (RewardModelConfig, "policy")
    data = f"data={{train: {{kind: jsonl, path: {tmp_path}/rows.jsonl}}}}"
    folder = path(model, tmp_path)
    config = load_config(schema, [], [data, f"{key}_path={model}", f"export_dir={folder}"])
    with pytest.raises(UserError, match=f"^export_dir {folder} {problem}"):
        check_early(command, config, {})


def test_a_filled_folder_is_refused_and_an_empty_one_is_not(tmp_path: Path) -> None:
    check_new_folder(tmp_path, sources=["owner/name", "", str(tmp_path / "none")])
    check_new_folder(tmp_path / "a/b")
    assert not list(tmp_path.iterdir()), "nothing is made"
    (tmp_path / "tracking").mkdir()
    check_new_folder(tmp_path, may_have=["tracking"])  # of a run that was killed
    with pytest.raises(UserError, match=rf"^{tmp_path} is not empty \(it has tracking\): give a"):
        check_new_folder(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty \(it has notes\.txt\)"):
        check_new_folder(tmp_path, may_have=["tracking"])
    for name in ("notes.txt", "notes.txt/deeper"):
        with pytest.raises(UserError, match=r"cannot write there: .*notes\.txt is not a folder"):
            check_new_folder(tmp_path / name)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="cannot write there"):
        check_new_folder(tmp_path / "loop")


def write_half(final: Path, error: BaseException) -> None:
    with whole_folder(final) as aside:
        (aside / "config.json").write_text("half")
        raise error


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "deep/model"
    with pytest.raises(OSError, match="full"):
        write_half(final, OSError("full"))
    assert not list(tmp_path.iterdir())
    (final / ".saving").mkdir(parents=True)  # what a command leaves that was killed
    (final / ".saving/half").write_text("half")
    check_new_folder(final)
    with whole_folder(final) as aside:
        (aside / "config.json").write_text("new")
        assert not (final / "config.json").exists()
    assert [path.name for path in final.iterdir()] == ["config.json"]
    with pytest.raises(KeyboardInterrupt):
        write_half(final, KeyboardInterrupt())
    with whole_folder(final) as aside:
        (aside / "weights").write_text("newer")
    assert {path.name: path.read_text() for path in final.iterdir()} == {
        "config.json": "new",
        "weights": "newer",
    }
