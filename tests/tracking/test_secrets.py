"""No credential in what runs write, print or record, against a real server with passwords."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from mlflow import MlflowClient

from tests.config.fits import ON_STATE_TRACKING, STATE_TRACKING
from tests.integration.commands import SMALL, vapo_forked
from tests.tracking.mlflow_server import Server
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.config.written import flatten_written, to_yaml
from vapo.tracking.inputs import recorded_tracking
from vapo.tracking.logger import RunLogger
from vapo.tracking.stores import locate_store

USER, PASSWORD, TOKEN = "keeper", "pa55-w@rd/of-the-store", "t0ken-0123456789"
SECRETS = (PASSWORD, quote(PASSWORD, safe=""), TOKEN)
TINY = [
    *SMALL,
    "data.train.num_examples=32",
    "data.heldout.num_examples=4",
    "components.value_pretraining.num_iterations=1",
    "components.group_sampling.num_prompts=4",
    "training.num_iterations=1",
    "evaluation.k=1",
]
SUPERVISED = [
    *("num_steps=2", "batch_size=8", "data.train.num_examples=32", "data.heldout.num_examples=4"),
    *("trainer.accelerator=cpu", "trainer.num_threads=1"),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """It asks for a password; its own password file lies outside of the store."""
    store, private = tmp_path / "store", tmp_path / "private"
    store.mkdir()
    private.mkdir()
    (private / "auth.ini").write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{private}/auth.db\n"
        f"admin_username = {USER}\nadmin_password = {PASSWORD}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        "auth_cache_ttl_seconds = 900\n"  # a tenth of a second for each request without
    )
    running = Server(
        store,
        ["--app-name", "basic-auth"],
        log=private / "server.log",
        MLFLOW_FLASK_SERVER_SECRET_KEY="of this test",
        MLFLOW_AUTH_CONFIG_PATH=str(private / "auth.ini"),
    )
    try:
        running.start()
        yield running
    finally:
        running.stop()


def vapo(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, with no credentials but these."""
    return vapo_forked(*args, without="MLFLOW_TRACKING_", timeout_s=500, **variables)


def shown(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout[-3000:] + done.stderr[-3000:]


def files_with_secrets(*folders: Path) -> list[str]:
    """Files in which a secret stands, checkpoints and databases included, and file names."""
    found = []
    for folder in folders:
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files, folder
        for path in files:
            content = path.read_bytes() + str(path.name).encode()
            found += [f"{path}: {s}" for s in SECRETS if s.encode() in content]
    return found


@pytest.mark.attacks
@pytest.mark.timeout(1500)
def test_six_commands_keep_a_password_and_a_token_to_themselves(server: Server, tmp_path: Path):
    out = tmp_path / "out"
    uri = f"http://{USER}:{quote(PASSWORD, safe='')}@{server.address}"
    secret = [f"tracking.uri={uri}", "tracking.tags.token=${oc.env:VAPO_TEST_TOKEN}"]
    secret += ["tracking.experiment=secrets"]
    config = (*ON_STATE_TRACKING, *TINY, *secret)
    grid = tmp_path / "grid.yaml"
    grid.write_text("rows: [{row: base, overrides: {components.value_pretraining.enabled: false}}]")
    commands = {
        "fit": [*config, f"output_dir={out}/fit"],
        "sft": [
            *("--config", "conf/state_tracking/sft.yaml", f"export_dir={out}/policy"),
            *(*SUPERVISED, *secret, "evaluation.k=1"),
        ],
        "reward-model": [
            *("--config", "conf/state_tracking/reward_model.yaml", f"export_dir={out}/rewards"),
            *(*SUPERVISED, *secret),
        ],
        "filter": [*config, f"output_dir={out}/filter", "--num_responses", "2"],
        "validate": [*config, f"output_dir={out}/validate"],
        "sweep": [*config, f"output_dir={out}/sweep", "--grid", str(grid), "--seeds", "0"],
    }
    for name, arguments in commands.items():
        done = vapo(name, *arguments, VAPO_TEST_TOKEN=TOKEN)
        assert done.returncode == 0, f"{name}: {shown(done)}"
        assert not [s for s in SECRETS if s in done.stdout + done.stderr], f"{name}: {shown(done)}"
    assert files_with_secrets(out, server.folder) == []

    run_dir = Path(next((out / "fit").iterdir()))
    written = (run_dir / "config.yaml").read_text()
    assert f"uri: http://{server.address}\n" in written
    assert "token: ${oc.env:VAPO_TEST_TOKEN}" in written
    check_resume(run_dir, tmp_path)
    assert files_with_secrets(out, server.folder) == []
    check_store(server.address)
    check_outage(server, uri, tmp_path / "outage")


def check_resume(run_dir: Path, tmp_path: Path) -> None:
    """The run's own config and the environment are enough, and only both are."""
    again = ["fit", "--config", str(run_dir / "config.yaml"), "training.num_iterations=2"]
    again += ["--ckpt_path", str(run_dir / "checkpoints/last.ckpt")]
    names = {"MLFLOW_TRACKING_USERNAME": USER, "MLFLOW_TRACKING_PASSWORD": PASSWORD}
    done = vapo(*again, **names)
    assert done.returncode == 2
    assert "VAPO_TEST_TOKEN is not set" in done.stderr
    assert "tracking.tags.token" in done.stderr
    done = vapo(*again, VAPO_TEST_TOKEN=TOKEN)
    assert done.returncode == 2
    assert "MLFLOW_TRACKING_PASSWORD" in done.stderr
    done = vapo(*again, VAPO_TEST_TOKEN="another-token-now", **names)
    assert done.returncode == 0, shown(done)
    assert PASSWORD not in done.stdout + done.stderr


def check_outage(server: Server, uri: str, folder: Path) -> None:
    """What waits in the journal, and what is said of it."""
    notes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VAPO_TEST_TOKEN", TOKEN)
        overrides = [f"tracking.uri={uri}", "tracking.tags.token=${oc.env:VAPO_TEST_TOKEN}"]
        config = load_config(FitConfig, STATE_TRACKING, overrides)
        logger = RunLogger(
            recorded_tracking(config),
            run_name="outage",
            note=notes.append,
            journal=folder / "tracking",
        )
        server.stop()
        logger.log_config(to_yaml(config), flatten_written(config))
        left = logger.close()
        locate_store("mlruns").hand_over_credentials()  # takes back what was handed over
    assert left >= 3, notes
    assert "vapo deliver" in "".join(notes)
    assert not [s for s in SECRETS for note in notes if s in note]
    assert files_with_secrets(folder) == []


def check_store(address: str) -> None:
    """What was not to be seen of the store is there, for who has the password."""
    environment = {"MLFLOW_TRACKING_USERNAME": USER, "MLFLOW_TRACKING_PASSWORD": PASSWORD}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        client = MlflowClient(f"http://{address}")
        experiment = client.get_experiment_by_name("secrets")
        assert experiment is not None
        runs = client.search_runs([experiment.experiment_id])
    commands = sorted(run.data.tags.get("command", "sweep") for run in runs)
    assert commands == ["filter", "fit", "fit", "reward-model", "sft", "sweep"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    token = {run.data.tags["token"] for run in runs if "token" in run.data.tags}
    assert token == {"${oc.env:VAPO_TEST_TOKEN}"}
    (sft,) = [run for run in runs if run.data.tags.get("command") == "sft"]
    assert sft.data.params["tracking.uri"] == f"http://{address}"
