"""A start that is refused leaves no folder behind, wherever it is refused after the folder is made.

The refusals are put where the real ones come from: each takes the place of one function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from tests.runs.runs import TINY
from tests.systems import system_config
from tests.tiny_model import tiny_tokenizer
from tests.tracking.ready_stores import ready_store
from vapo.commands.filter import ResumableParts
from vapo.commands.fit import run
from vapo.config import FitConfig, SftConfig
from vapo.config.loading import load_config
from vapo.errors import InterruptedRunError, UserError
from vapo.files.made_folders import make_folders, taken_back_if_refused
from vapo.prompts.load import PromptSplit
from vapo.runs.run_dirs import FIRST_FILES
from vapo.sweep.folders import locked
from vapo.system.progress import Progress
from vapo.training.supervised import recorded_run

ROOT = Path(__file__).parents[2]
PLACES = {
    "a disk without locks": "vapo.runs.run_dirs.try_lock",
    "a verifier": "vapo.commands.fit.make_scorer",
    "a tracking server that is away": "vapo.tracking.logger.open_store",
    "a tracking server that makes no run": "mlflow.MlflowClient.create_run",
    "another logger": "vapo.tracking.logger.Also",
    "weights": "vapo.commands.fit.module_of",
    "a disk without room": "vapo.training.callbacks.checkpointing.check_space",
    "an engine's server that is away": "vapo.training.parts.make_sampler",
}


def refusing(error: Exception) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    return refuse


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FitConfig:
    monkeypatch.chdir(ROOT)
    store = ready_store(tmp_path / "store")
    where = [f"output_dir={tmp_path}/new/runs", f"tracking.uri={store}", "tracking.also=[csv]"]
    return system_config("vapo", *TINY, *where)


@pytest.mark.parametrize("place", PLACES)
def test_a_refused_start_leaves_no_folder(
    place: str, config: FitConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error: Exception = UserError("refused")
    if place == "a tracking server that makes no run":
        error = MlflowException("refused")
    elif place == "a disk without room":
        error = OSError("refused")
    monkeypatch.setattr(PLACES[place], refusing(error))
    with pytest.raises(UserError, match="refused"):
        run(config)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_was_there_and_other_runs_stay(
    config: FitConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "new/runs/20200101-000000_other"
    other.mkdir(parents=True)
    monkeypatch.setattr(PLACES["a tracking server that is away"], refusing(UserError("refused")))
    with pytest.raises(UserError, match="refused"):
        run(config)
    assert list((tmp_path / "new/runs").iterdir()) == [other]


@pytest.mark.slow
def test_a_run_that_has_begun_keeps_its_folder(
    config: FitConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its evaluation is recorded, when the first iteration cannot be sampled."""
    monkeypatch.setattr(
        "vapo.rollouts.source.RolloutSource.next_batch", refusing(InterruptedRunError("lost"))
    )
    with pytest.raises(InterruptedRunError, match="lost"):
        run(config)
    (folder,) = (tmp_path / "new/runs").iterdir()
    assert {"config.yaml", "run.json", "tracking"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("place", ["a tracking server that is away", "a disk without room"])
def test_a_supervised_command_leaves_none(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.chdir(ROOT)
    where = [f"export_dir={tmp_path}/new/policy", f"tracking.uri={tmp_path}/ml"]
    config = load_config(SftConfig, [Path("conf/state_tracking/sft.yaml")], where)
    name = {"a disk without room": "vapo.training.supervised.check_space"}.get(place, PLACES[place])
    error = OSError("refused") if "room" in place else UserError("refused")
    monkeypatch.setattr(name, refusing(error))
    monkeypatch.setattr("vapo.training.supervised.make_scorer", no_scorer)
    prompts = PromptSplit.__new__(PromptSplit)
    network = torch.nn.Linear(1, 1)
    with (
        pytest.raises(UserError, match="refused"),
        recorded_run(config, FitConfig.__new__(FitConfig), "sft", prompts, network),
    ):
        raise AssertionError("it was not refused")
    assert not (tmp_path / "new").exists()


@contextmanager
def no_scorer(config: Any) -> Iterator[None]:
    yield


def test_a_sweeps_folder_and_a_files_parts_are_taken_back(
    config: FitConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vapo.commands.filter.policy_player", refusing(UserError("refused")))
    parts = ResumableParts(tmp_path / "new/rates.jsonl", "settings", num=2)
    with pytest.raises(UserError, match="refused"):
        parts.fill("pass rates", config, tiny_tokenizer(), Progress(enabled=False), print)
    with pytest.raises(UserError, match="refused"), locked(tmp_path / "new/sweep"):
        raise UserError("refused")
    assert not (tmp_path / "new").exists()


def refuse_in(folder: Path, work: Callable[[], object], error: Exception | None = None) -> None:
    """Make the folder, do something in it, and end by an error."""
    with taken_back_if_refused(make_folders(folder), FIRST_FILES):
        work()
        raise error or UserError("refused")


@pytest.mark.parametrize("name", FIRST_FILES)
def test_what_a_command_writes_first_is_removed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "a/b/c"
    with pytest.raises(UserError):
        refuse_in(folder, (folder / name).touch)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_removed_with_an_empty_one_in_it(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        refuse_in(tmp_path / "a/b", (tmp_path / "a/b/checkpoints").mkdir)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["summary.json", "tracking/journal.jsonl", "run.json/inside"])
def test_work_is_kept_with_all_that_is_beside_it(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "a/b"

    def work() -> None:
        (folder / ".lock").touch()
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()

    with pytest.raises(UserError):
        refuse_in(folder, work)
    assert (folder / name).exists()
    assert (folder / ".lock").exists()


def test_what_lies_beside_the_made_folder_is_kept(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        refuse_in(tmp_path / "a/b", (tmp_path / "a/other").touch)
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a/other"]


def test_a_folder_of_somebody_elses_a_link_and_another_error_change_nothing(tmp_path: Path) -> None:
    there, link, made = tmp_path / "there", tmp_path / "new/link", tmp_path / "made"
    there.mkdir()
    with pytest.raises(UserError):
        refuse_in(there, (there / ".lock").touch)
    assert (there / ".lock").exists()
    with pytest.raises(UserError):
        refuse_in(link.parent, lambda: link.symlink_to(there))
    assert link.is_symlink()
    with pytest.raises(ZeroDivisionError):  # a bug of ours, for which the folder is looked at
        refuse_in(made, made.exists, ZeroDivisionError())
    assert made.exists()
