"""Which run and which checkpoint are resumed, and that nobody else is at work there."""

from __future__ import annotations

import json
import multiprocessing
import shlex
from datetime import UTC, datetime, tzinfo
from pathlib import Path

import pytest

from tests.config.fits import STATE_TRACKING, fit_config
from tests.runs.test_manifests import write
from vapo import cli
from vapo.config.checkpoints import FREE_KEYS
from vapo.config.options import describe
from vapo.config.schema import FitConfig
from vapo.config.written import to_yaml
from vapo.errors import UserError
from vapo.runs.manifests import checkpoint_name
from vapo.runs.resuming import (
    changed_keys,
    check_resumable,
    choose_resume,
    find_checkpoint,
    how_to_resume,
    meant_by,
)
from vapo.runs.run_dirs import Resume, RunDir, identity_of, open_run_dir, order_of_runs, read_record


def made_up(folder: Path, name: str, identity: str, state: str = "running") -> Path:
    run = folder / "runs" / name
    run.mkdir(parents=True)
    record = {"state": state, "identity": identity, "mlflow_run_id": f"id-{name}"}
    (run / "run.json").write_text(json.dumps(record))
    return run


def test_auto_takes_the_newest_unfinished_run_of_the_config(tmp_path: Path) -> None:
    config = fit_config(tmp_path, f"output_dir={tmp_path / 'runs'}", "checkpoints.resume=auto")
    told: list[str] = []
    assert choose_resume(config, None, told.append) is None
    assert "no unfinished run of this config" in told[-1]
    ours = identity_of(config)
    made_up(tmp_path, "1_older", ours)
    chosen = made_up(tmp_path, "2_chosen", ours)
    made_up(tmp_path, "3_other_config", "other")
    made_up(tmp_path, "4_finished", ours, "finished")
    (made_up(tmp_path, "5_damaged", ours) / "run.json").write_text("{")
    assert choose_resume(config, None, told.append) == Resume(chosen, None)
    checkpoint = write(chosen / "checkpoints", 3)
    assert choose_resume(config, None, told.append) == Resume(chosen, checkpoint)
    assert told[-1] == f"checkpoints.resume: resuming {chosen} from iteration_000003"
    never = fit_config(tmp_path, f"output_dir={tmp_path / 'runs'}")
    assert choose_resume(never, None, told.append) is None
    best = choose_resume(config, str(checkpoint), told.append)
    assert best == Resume(chosen, checkpoint), "a path wins"


def test_the_identity_leaves_out_what_may_change(tmp_path: Path) -> None:
    plain = identity_of(fit_config(tmp_path))
    same = ["output_dir=x", "tracking.uri=y", "checkpoints.keep=5", "trainer.num_threads=3"]
    assert identity_of(fit_config(tmp_path, *same)) == plain
    for change in ("seed=1", "actor.optimizer.lr=1e-3", "training.num_iterations=7"):
        assert identity_of(fit_config(tmp_path, change)) != plain
    keys = describe(FitConfig)
    for free in FREE_KEYS:
        assert any(key == free or key.startswith(f"{free}.") for key in keys), free


def _hold(path: Path, ready: object, release: object) -> None:
    run_dir = RunDir(path)
    run_dir.lock()
    ready.set()  # type: ignore[attr-defined]
    release.wait(60)  # type: ignore[attr-defined]


def test_a_run_at_work_is_left_alone(tmp_path: Path) -> None:
    config = fit_config(tmp_path, f"output_dir={tmp_path / 'runs'}", "checkpoints.resume=auto")
    run = made_up(tmp_path, "1_at_work", identity_of(config))
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(run, ready, release))
    process.start()
    assert ready.wait(60)
    try:
        assert choose_resume(config, None, lambda text: None) is None
        with pytest.raises(UserError, match="still at work"):
            open_run_dir(config, "x", resume=Resume(run, None))
    finally:
        release.set()
        process.join()
    (run / "summary.json").touch()
    opened = open_run_dir(config, "x", resume=Resume(run, None))
    assert opened.mlflow_run_id == "id-1_at_work"
    assert not (run / "summary.json").exists(), "it has not finished"
    opened.record("finished", "new-id")
    assert read_record(run)["mlflow_run_id"] == "new-id"
    opened.close()
    assert opened.is_same_config
    other = fit_config(tmp_path, f"output_dir={tmp_path / 'runs'}", "seed=5")
    opened = open_run_dir(other, "x", resume=Resume(run, None))
    assert not opened.is_same_config, "its steps are recorded once more"
    opened.close()


def test_shards_go_on_sharded(tmp_path: Path) -> None:
    shards, file = write(tmp_path / "a", 1, shards=True), write(tmp_path / "b", 1)
    alone = fit_config(tmp_path)
    for checkpoint in (shards, file):
        check_resumable(checkpoint, fit_config(tmp_path, "trainer.strategy=fsdp"))
    check_resumable(file, alone)
    with pytest.raises(UserError, match=r"sharded checkpoint: set trainer\.strategy=fsdp"):
        check_resumable(shards, alone)


def test_last_best_and_paths(tmp_path: Path) -> None:
    older, newer = (tmp_path / name / "checkpoints" for name in ("1_run", "2_run"))
    write(older, 1)
    for iteration in (1, 2):
        write(newer, iteration)
    (older / "best.ckpt").symlink_to(checkpoint_name(1))
    told: list[str] = []

    def find(name: str) -> Path:
        return find_checkpoint(str(tmp_path), name, told.append)

    assert find("last") == newer / checkpoint_name(2)
    assert told == [f"--ckpt_path last: {newer / checkpoint_name(2)}"]
    assert find("best") == older / checkpoint_name(1)
    assert find(str(newer / checkpoint_name(1))) == newer / checkpoint_name(1)
    (newer / checkpoint_name(2) / "state.pt").write_bytes(b"cut")
    assert find("last") == newer / checkpoint_name(1)
    assert told[-1] == f"--ckpt_path last: {newer / checkpoint_name(1)}"
    assert find(str(newer / "last.ckpt")) == newer / checkpoint_name(1)
    assert "damaged: 3 bytes of" in told[-2]
    assert told[-1] == f"--ckpt_path {newer / 'last.ckpt'}: {newer / checkpoint_name(1)}"
    with pytest.raises(UserError, match=r"state\.pt is damaged"):
        find(str(newer / checkpoint_name(2)))
    (older / checkpoint_name(1) / "state.pt").unlink()
    with pytest.raises(UserError, match=r"state\.pt is missing"):
        find("best")
    with pytest.raises(UserError, match="no checkpoint"):
        find(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"has a last\.ckpt; start one without"):
        find_checkpoint(str(tmp_path / "empty"), "last", told.append)


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_beside_a_runs_own_config_last_and_best_are_that_runs(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = tmp_path / "1_run", tmp_path / "2_run"
    for folder in (older, newer):
        write(folder / "checkpoints", 1)
        (folder / "run.json").write_text("{}")
        (folder / "config.yaml").write_text(f"extends: {STATE_TRACKING[0]}\n")
    (newer / "checkpoints/best.ckpt").symlink_to(checkpoint_name(1))
    own, copied = older / "config.yaml", tmp_path / "config.yaml"
    copied.write_text("")
    assert meant_by("last", [own]) == str(older / "checkpoints/last.ckpt")
    assert meant_by("last", [own, newer / "config_1.yaml"]) == str(newer / "checkpoints/last.ckpt")
    assert meant_by("last", [own, tmp_path / "overlay.yaml"]) == str(
        older / "checkpoints/last.ckpt"
    )
    assert meant_by("a.ckpt", [own]) == "a.ckpt"
    assert meant_by("last", [copied]) == "last"
    chosen = ["--config", str(own), "--ckpt_path", "best", f"output_dir={tmp_path}"]
    assert cli.main([command, *chosen]) == 2
    assert f"no checkpoint {older / 'checkpoints/best.ckpt'}" in capsys.readouterr().err


def test_the_newest_run_is_the_one_that_began_last_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is set back between two runs, and the time zone is another one."""
    runs = tmp_path / "runs"
    config = fit_config(tmp_path, f"output_dir={runs}", "checkpoints.resume=auto")
    write(made_up(tmp_path, "20990101-000000_without_a_number", "other") / "checkpoints", 9)
    began = []
    for name, now, zone in (
        ("first", datetime(2026, 10, 25, 0, 59, tzinfo=UTC), "Pacific/Kiritimati"),
        ("second", datetime(2026, 10, 25, 0, 30, tzinfo=UTC), "Pacific/Midway"),
    ):
        monkeypatch.setenv("TZ", zone)
        monkeypatch.setattr("vapo.runs.run_dirs.datetime", FakeClock(now))
        run_dir = open_run_dir(config, name, resume=None)
        write(run_dir.checkpoints, 1)
        run_dir.record("running", "id")
        began.append(run_dir.path)
        run_dir.close()
    assert [path.name[:15] for path in began] == ["20261025-005900", "20261025-003000"]
    told: list[str] = []
    last = find_checkpoint(str(runs), "last", told.append)
    assert last == began[1] / "checkpoints" / checkpoint_name(1)
    chosen = choose_resume(config, None, told.append)
    assert chosen is not None
    assert chosen.run_dir == began[1]
    resumed = open_run_dir(config, "x", resume=chosen)
    resumed.record("finished", "id")
    resumed.close()
    assert [order_of_runs(path)[0] for path in began] == [1, 2], "a resumed run keeps its number"


class FakeClock:
    def __init__(self, moment: datetime) -> None:
        self.moment = moment

    def now(self, zone: tzinfo | None = None) -> datetime:
        return self.moment.astimezone(zone)


def test_a_run_does_not_go_on_beyond_its_end(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoints", 7)
    phases = "components.value_pretraining.num_iterations=3"
    enough = fit_config(tmp_path, phases, "training.num_iterations=4")
    check_resumable(checkpoint, enough)
    shorter = fit_config(tmp_path, phases, "training.num_iterations=3")
    with pytest.raises(
        UserError, match=r"iteration 7, beyond the 6 of this config .3 of value pre"
    ):
        check_resumable(checkpoint, shorter)
    other = fit_config(tmp_path, "actor.path=another/model")
    (tmp_path / "config.yaml").write_text(to_yaml(other))
    with pytest.raises(
        UserError, match=r"saved by a run with another actor: actor\.path another/model ->"
    ):
        check_resumable(checkpoint, shorter)


def test_what_has_changed_since_the_run_went_on_is_named(tmp_path: Path) -> None:
    began = fit_config(tmp_path, f"output_dir={tmp_path / 'runs'}")
    run_dir = open_run_dir(began, "name", resume=None)
    assert changed_keys(run_dir, began) == []
    now = fit_config(tmp_path, "seed=3", "data.train.path=other.jsonl", "output_dir=elsewhere")
    assert changed_keys(run_dir, now) == [
        "seed 0 -> 3",
        "data.train.path prompts.jsonl -> other.jsonl",
    ]
    run_dir.replace_config(now)
    assert changed_keys(run_dir, now) == []
    later = fit_config(tmp_path, "seed=3", "output_dir=elsewhere")
    assert changed_keys(run_dir, later) == ["data.train.path other.jsonl -> prompts.jsonl"]
    run_dir.replace_config(later)
    kept = [(run_dir.path / f"config_{number}.yaml").read_text() for number in (1, 2)]
    assert kept == [to_yaml(began), to_yaml(now)]
    (run_dir.path / "config.yaml").unlink()
    run_dir.replace_config(now)
    assert (run_dir.path / "config.yaml").read_text() == to_yaml(now)
    run_dir.close()


def test_the_command_that_resumes_takes_a_folder_with_a_space_as_one_word(tmp_path: Path) -> None:
    last = RunDir(tmp_path / "my runs" / "it's one").checkpoints / "last.ckpt"
    last.mkdir(parents=True)
    _, _, option = how_to_resume(RunDir(tmp_path / "my runs" / "it's one")).partition("with ")
    assert shlex.split(option.partition(", or")[0]) == ["--ckpt_path", str(last)]
