"""A run's folder that somebody else has made: nothing outside of it is read, sent or removed, and
nothing is sent to a store that only the folder names."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.commands.test_early_checks import fit_config
from vapo.cli import main
from vapo.commands.file_checks import check_store
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.config.schema import TrackingConfig
from vapo.errors import UserError
from vapo.runs.run_dirs import Resume, open_run_dir, read_record
from vapo.tracking.journal import Journal, read_from
from vapo.tracking.journal_folders import read_target, set_aside_others
from vapo.tracking.known_stores import check_known, is_known, keeps_beside, remember_store
from vapo.tracking.logger import RunLogger
from vapo.tracking.records import Record, with_table
from vapo.tracking.stores import locate_store

ROOT = Path(__file__).parents[2]
HEX = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def nobody_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user who has named no store yet, with credentials in the environment."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "not-for-them")


def received(folder: Path, uri: str, run_id: str, *lines: Any) -> Path:
    """The folder of a run with a journal of these lines."""
    journal = folder / "tracking"
    (journal / "files").mkdir(parents=True)
    (journal / "target.json").write_text(json.dumps({"tracking_uri": uri, "mlflow_run_id": run_id}))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (journal / "journal.jsonl").write_text(text)
    return folder


def file_line(payload: Any, name: Any = "a.txt") -> dict[str, Any]:
    return {"kind": "file", "payload": payload, "name": name}


@pytest.fixture
def run_id(tracking: TrackingConfig) -> str:
    client = MlflowClient(locate_store(tracking.uri).uri)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    return str(client.create_run(experiment.experiment_id).info.run_id)


def artifacts(tracking: TrackingConfig, run_id: str) -> list[str]:
    client = MlflowClient(locate_store(tracking.uri).uri)
    return [one.path for one in client.list_artifacts(run_id)]


def test_no_file_of_the_user_is_sent_or_removed(
    tracking: TrackingConfig, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By paths that lead out, by links, and by what is no file: each is set aside with a reason."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / HEX).write_text("secret")
    good, link, fifo, folder, large = (f"files/{x * 32}" for x in "abcde")
    payloads = [
        str(secret), "../../secret", "files/../../../secret", f"files/{HEX}/../x", "sent.json",
        f"files/{HEX}\n", f"files//{HEX}", f"FILES/{HEX}", f"files/{HEX.upper()}", "", None, 3,
        [good], f"./files/{HEX}", link, fifo, folder, large,
    ]  # fmt: skip
    lines = [file_line(payload) for payload in payloads]
    run = received(tmp_path / "run", "http://127.0.0.1:9", run_id, *lines, file_line(good))
    journal = run / "tracking"
    (journal / good).write_text("theirs")
    (journal / link).symlink_to(secret)
    os.mkfifo(journal / fifo)
    (journal / folder).mkdir()
    with (journal / large).open("wb") as file:
        file.truncate(2**31)
    assert main(["deliver", str(run), "--tracking_uri", tracking.uri]) == 0
    assert f"{len(lines)} refused" in capsys.readouterr().out
    assert secret.read_text() == "secret"
    assert artifacts(tracking, run_id) == ["a.txt"]
    assert not (journal / good).exists(), "it was sent"
    shutil.rmtree(journal / "files")
    (journal / "files").symlink_to(tmp_path / "folder")
    with pytest.raises(UserError, match=r"files is a link"):
        Journal(journal)
    assert main(["deliver", str(run), "--tracking_uri", tracking.uri]) == 2


@pytest.mark.parametrize("name", ["lock", "sent.json", "target.json", "journal.jsonl", "files"])
@pytest.mark.parametrize("kind", ["link", "fifo", "dangling"])
def test_a_journal_with_links_in_place_of_its_files(tmp_path: Path, name: str, kind: str) -> None:
    mine = tmp_path / "mine"
    mine.write_text("half a line")
    journal = received(tmp_path / "run", "http://127.0.0.1:9", HEX) / "tracking"
    path = journal / name
    shutil.rmtree(path) if name == "files" else path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(mine if kind == "link" else tmp_path / "none")
    with pytest.raises(UserError, match=f"{name} is a link, or of another kind"):
        Journal(journal)
    read_target(journal)
    assert mine.read_text() == "half a line"
    assert not (tmp_path / "none").exists()


def test_links_that_come_while_the_journal_is_open_are_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    folder = tmp_path / "tracking"
    journal = Journal(folder)
    for name in ("refused.jsonl", ".sent.json", "target.json"):
        (folder / name).symlink_to(mine)
    with pytest.raises(OSError, match="symbolic links"):
        journal.bind("http://host", HEX)
    journal.append(Record("tags", {"a": "b"}))
    with pytest.raises(OSError, match="symbolic links"):
        journal.remove_oldest(1, refused_for="x")
    journal.remove_oldest(1)
    journal.close()
    assert mine.read_text() == "mine"


MALFORMED = [
    {"kind": "metrics", "payload": [["a", 1.0, 1]]},
    {"kind": "metrics", "payload": [["a", 1.0, 10**30, 0]]},
    {"kind": "metrics", "payload": [["a", True, 1, 0]]},
    {"kind": "metrics", "payload": 3},
    {"kind": "tags", "payload": ["mlflow.loggedArtifacts"]},
    {"kind": "tags", "payload": {"a": 1}},
    {"kind": "params", "payload": None},
    {"kind": "status", "payload": "FINISHED"},
    {"kind": "inputs", "payload": [["a"]]},
    {"kind": "note", "payload": 1},
    {"kind": "nothing", "payload": 1},
    {"kind": "note", "payload": "a", "more": 1},
    [],
]


def test_records_that_no_run_writes_are_damaged_ones(
    tracking: TrackingConfig, tmp_path: Path
) -> None:
    run = received(tmp_path / "run", "http://127.0.0.1:9", HEX, *MALFORMED)
    with (run / "tracking/journal.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    assert read_from(run / "tracking")[0] == []
    (run / "tracking/target.json").unlink()
    logger = RunLogger(tracking, run_name="x", journal=run / "tracking", note=lambda _: None)
    assert logger.close() == 0
    assert len((run / "tracking/refused.jsonl").read_text().splitlines()) == len(MALFORMED) + 1


@pytest.mark.parametrize(
    "target",
    [
        {"tracking_uri": "http://host", "mlflow_run_id": "../../x"},
        {"tracking_uri": "http://host", "mlflow_run_id": None},
        {"tracking_uri": "http://host"},
        {"tracking_uri": ["http://host"], "mlflow_run_id": HEX},
        [],
    ],
)
def test_a_target_that_leads_elsewhere(tmp_path: Path, target: Any) -> None:
    folder = tmp_path / "run/tracking"
    folder.mkdir(parents=True)
    (folder / "target.json").write_text(json.dumps(target))
    assert read_target(folder) is None
    set_aside_others(folder, "another", pytest.fail)
    assert folder.is_dir()


def test_a_store_that_only_the_folder_names(
    tracking: TrackingConfig,
    run_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is asked for, once; nobody is connected to before."""
    metric = {"kind": "metrics", "payload": [["a", 1.0, 1, 0]]}
    store = locate_store(tracking.uri)
    uri = f"sqlite:////{store.database}"  # the same file by another name, as another store
    monkeypatch.setattr("vapo.tracking.known_stores.keeps_beside", lambda store, run_id: False)
    run = received(tmp_path / "run", uri, run_id, metric)

    def refuse(*_: object) -> None:
        raise AssertionError("the store is used")

    with monkeypatch.context() as patched:
        patched.setattr("vapo.commands.deliver.client_of", refuse)
        assert main(["deliver", str(run)]) == 2
        error = capsys.readouterr().err
        assert f"names the store {uri}" in error
        assert f"add --tracking_uri {uri}" in error
        assert main(["deliver", str(run), "--list"]) == 0, "which asks no store"
    assert main(["deliver", str(run), "--tracking_uri", uri]) == 0
    again = received(tmp_path / "again", uri, run_id, metric)
    assert main(["deliver", str(again)]) == 0, "the user has named it before"


def test_a_local_store_that_has_the_run_and_its_files_beside_it(
    own_store: TrackingConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is used without being named, unless its database would have files written elsewhere."""
    store = locate_store(own_store.uri)
    assert store.database is not None
    client = MlflowClient(store.uri)
    experiment = client.create_experiment("beside", store.artifact_location)
    run_id = str(client.create_run(experiment).info.run_id)
    run = received(tmp_path / "run", store.shown_uri, run_id, file_line(f"files/{HEX}"))
    (run / "tracking/files" / HEX).write_text("theirs")
    for elsewhere in (f"file://{tmp_path}/mine", f"{store.artifact_location}/%2e%2e/x", "s3://x"):
        with closing(sqlite3.connect(store.database)) as database:
            change = "UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?"
            database.execute(change, (elsewhere, run_id))
            database.commit()
            assert main(["deliver", str(run)]) == 2
            database.execute(change, (f"{store.artifact_location}/{run_id}/artifacts", run_id))
            database.commit()
    assert capsys.readouterr().err.count("names the store") == 3
    assert main(["deliver", str(run)]) == 0
    assert [one.path for one in client.list_artifacts(run_id)] == ["a.txt"]
    assert not keeps_beside(store, HEX)
    (tmp_path / "other.db").write_text("no database")
    assert not keeps_beside(locate_store(f"sqlite:///{tmp_path / 'other.db'}"), run_id)
    assert not keeps_beside(locate_store(str(tmp_path / "none")), run_id)
    assert not (tmp_path / "none").exists()


def write_database(path: Path, artifact_uri: str) -> None:
    """A database with what is asked of one: the run, and where its files lie."""
    path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE runs (run_uuid TEXT, artifact_uri TEXT)")
        database.execute("INSERT INTO runs VALUES (?, ?)", (HEX, artifact_uri))
        database.commit()


@pytest.mark.parametrize("link", ["", HEX, f"{HEX}/artifacts", f"{HEX}/artifacts/pages"])
def test_no_file_is_written_through_links_of_a_received_store(tmp_path: Path, link: str) -> None:
    """Whoever makes the folder makes its store as well, with links to where files should come."""
    store = locate_store(str(tmp_path / "run/store"))
    assert store.database is not None
    write_database(store.database, f"{store.artifact_location}/{HEX}/artifacts")
    assert keeps_beside(store, HEX)
    there, mine = tmp_path / "run/store/artifacts" / link, tmp_path / "mine"
    (mine / HEX / "artifacts").mkdir(parents=True)
    there.parent.mkdir(parents=True, exist_ok=True)
    there.symlink_to(mine)
    assert not keeps_beside(store, HEX)


def test_the_options_of_an_address_open_no_other_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's own form of an address names another file than the same text does as a path."""
    monkeypatch.chdir(tmp_path)
    store = locate_store("sqlite:///file:./runs.db?uri=true")
    assert store.database is not None
    write_database(store.database, f"{store.artifact_location}/{HEX}/artifacts")
    assert not keeps_beside(store, HEX)


def test_whoever_has_recorded_in_a_store_has_named_it(
    tracking: TrackingConfig, tmp_path: Path
) -> None:
    store = locate_store(tracking.uri)
    assert not is_known(store)
    RunLogger(tracking, run_name="x", note=lambda _: None).close()
    assert is_known(store)
    text = (tmp_path / "state/vapo/stores").read_text()
    RunLogger(tracking, run_name="x", note=lambda _: None).close()
    assert (tmp_path / "state/vapo/stores").read_text() == text == f"{store.shown_uri}\n"


def test_what_is_the_same_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials are not written; nothing that only begins as a known address is known."""
    remember_store(locate_store("http://me:word@host:5000/"))
    remember_store(locate_store("postgresql://me:word@host/runs"))
    assert "word" not in (tmp_path / "state/vapo/stores").read_text()
    for uri in ("http://host:5000", "http://host:5000/", "postgresql://other@host/runs"):
        assert is_known(locate_store(uri)), uri
    for uri in (
        "http://host", "https://host:5000", "http://host:50000", "http://host:5000/x",
        "http://host:5000@evil.example", "http://evil.example/http://host:5000",
        "postgresql://host/runs?host=evil.example", "postgresql://host/run", str(tmp_path),
    ):  # fmt: skip
        assert not is_known(locate_store(uri)), uri
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:word@new:1")
    assert is_known(locate_store("http://new:1"))
    assert not is_known(locate_store("http://new:11"))


def test_a_home_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    store = locate_store("http://host:5000")
    remember_store(store)
    with pytest.raises(UserError, match=r"folder names the store http://host:5000, .* add x=http:"):
        check_known("http://host:5000", named_by=Path("folder"), how="x=")


@pytest.mark.parametrize("beside", ["run.json", "checkpoints", "tracking", "summary.json"])
def test_the_config_of_a_received_folder_chooses_no_store(tmp_path: Path, beside: str) -> None:
    """Its user does, by a config of another place, or on the command line."""
    run, shipped = tmp_path / "run", ROOT / "conf/vapo.yaml"
    run.mkdir()
    (run / beside).mkdir()
    own, overlay = run / "config.yaml", tmp_path / "overlay.yaml"
    own.write_text(f"extends: {shipped}\ntracking: {{uri: 'http://theirs:1'}}\n")
    overlay.write_text("tracking: {uri: 'http://mine:1'}\n")
    extending = tmp_path / "extending.yaml"
    extending.write_text("extends: run/config.yaml\n")

    def check(*files: Path, overrides: tuple[str, ...] = ()) -> None:
        check_store(load_config(FitConfig, list(files), list(overrides)))

    for files in ((own,), (shipped, own), (overlay, own), (extending,)):
        with pytest.raises(UserError, match=r"names the store http://theirs:1, .*tracking\.uri="):
            check(*files)
    check(own, overlay)
    for override in ("tracking.uri=http://theirs:1", f"tracking.uri={tmp_path / 'store'}"):
        check(own, overrides=(override,))
    own.write_text(f"extends: {shipped}\ntracking: {{uri: {tmp_path / 'runs'}}}\n")
    check(own)
    own.write_text(f"extends: {shipped}\ntracking: {{uri: {run / 'mlruns'}}}\n")
    with pytest.raises(UserError, match="names the store sqlite"):
        check(own)


@pytest.mark.parametrize(
    "name", [".lock", "tracking", "rollouts", "pretrained_critic", "csv", "wandb", "checkpoints"]
)
def test_a_resumed_run_writes_into_its_own_folder_alone(tmp_path: Path, name: str) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    (other / "checkpoints").mkdir(parents=True)
    (other / "run.json").write_text("{}")
    (run / name).symlink_to(other / "checkpoints")
    with pytest.raises(UserError, match=rf"{name} is a link"):
        open_run_dir(fit_config(), "x", resume=Resume(run, None))


def test_checkpoints_may_lie_on_another_disk(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk/of/checkpoints"
    run.mkdir()
    disk.mkdir(parents=True)
    (run / "checkpoints").symlink_to(disk)
    open_run_dir(fit_config(), "x", resume=Resume(run, None)).close()


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", '{"number": "1", "mlflow_run_id": "../x"}', "\xff"]
)
def test_a_record_that_no_run_writes(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text, encoding="latin-1")
    run_dir = open_run_dir(fit_config(), "x", resume=Resume(tmp_path, None))
    assert (run_dir.mlflow_run_id, run_dir.number) == (None, 0)
    run_dir.close()
    (tmp_path / "run.json").unlink()
    os.mkfifo(tmp_path / "run.json")
    assert read_record(tmp_path) == {}


def test_what_a_journal_did_not_write_stays_when_it_is_discarded(
    tracking: TrackingConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "tracking"
    (folder / "files").mkdir(parents=True)
    for name in ("mine", "files/mine"):
        (folder / name).write_text("mine")
    logger = RunLogger(tracking, run_name="x", journal=folder, note=lambda _: None)
    logger.log_text("a", "a.txt")
    assert logger.close() == 0
    logger.discard_journal()
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    assert left == ["files", "files/mine", "mine"]


def test_only_journals_are_delivered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = received(tmp_path / "run", "http://127.0.0.1:9", HEX)
    shutil.copytree(run / "tracking", run / "tracking_backup")
    shutil.copytree(run / "tracking", run / f"tracking-{HEX[:12]}")
    assert main(["deliver", str(run), "--list"]) == 0
    said = capsys.readouterr().out
    assert said.count("nothing to send") == 2
    assert "backup" not in said
    shutil.rmtree(run / "tracking")
    (run / "tracking").symlink_to(f"tracking-{HEX[:12]}")
    assert main(["deliver", str(run), "--list"]) == 2
    assert "is a link" in capsys.readouterr().err


def test_a_tag_that_somebody_has_written_into() -> None:
    for text in ("", "nonsense", "[" * 100_000):
        assert json.loads(with_table(text, "a.json")) == [{"path": "a.json", "type": "table"}]
