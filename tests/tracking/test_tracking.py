import json
import math
import time
from pathlib import Path

import matplotlib
import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from mlflow import MlflowClient

from vapo.config.schema import TrackingConfig
from vapo.errors import UserError
from vapo.tracking.logger import RunLogger
from vapo.tracking.stores import locate_store


def client_of(config):
    return MlflowClient(locate_store(config.uri).uri)


def test_metrics_arrive_complete_and_in_order_without_delaying_the_caller(tracking):
    logger = RunLogger(tracking, run_name="order", tags={"who": "call"})
    began = time.perf_counter()
    for step in range(400):
        logger.log_metrics({"actor/entropy": step / 7, "critic/value_loss": -step}, step=step)
    took = time.perf_counter() - began
    assert logger.close() == 0
    assert took < 5.0  # 400 synchronous calls take 10 s and more
    client = client_of(tracking)
    for key, factor in (("actor/entropy", 1 / 7), ("critic/value_loss", -1)):
        history = client.get_metric_history(logger.run_id, key)
        assert [point.step for point in history] == list(range(400))
        assert [point.value for point in history] == pytest.approx([s * factor for s in range(400)])
        assert [point.timestamp for point in history] == sorted(p.timestamp for p in history)
    run = client.get_run(logger.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "order"
    assert run.data.tags["who"] == "call"
    assert run.data.tags["version/torch"]
    assert run.data.tags["host/cpu"]


def test_infinity_is_recorded_as_nan_and_named_once(tracking):
    notes: list[str] = []
    logger = RunLogger(tracking, run_name="inf", note=notes.append)
    for step, value in enumerate([1.0, math.inf, -math.inf, math.nan, 2.0]):
        logger.log_metrics({"kl[0]": value}, step=step)
    logger.close()
    values = [p.value for p in client_of(tracking).get_metric_history(logger.run_id, "kl_0_")]
    assert values == pytest.approx([1.0, math.nan, math.nan, math.nan, 2.0], nan_ok=True)
    assert notes == ["tracking: kl[0] is inf at step 1; recorded as nan"]


def test_config_table_text_figure_and_file_are_readable_back(tracking, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRUNCATE_LONG_VALUES", "false")  # then mlflow refuses them
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    long_value = "x" * 7000
    params = {f"key.{i}": i for i in range(230)} | {"long": long_value, "none": None}
    with RunLogger(tracking, run_name="artifacts") as logger:
        logger.log_config("a: 1\n", params)
        logger.log_table([{"prompt": "1+1", "reward": 9.0}], "samples/iteration_0010.json")
        logger.log_table(
            [{"prompt": "p", "reward": 1.0}, {"prompt": "q", "reward": math.nan, "extra": (1, 2)}],
            "samples/iteration_0010.json",
        )
        logger.log_text("text \u0663 \ud800", "notes/a.txt")
        logger.log_figure(Figure(), "figures/empty.png")
    client, run_id = client_of(tracking), logger.run_id
    recorded = client.get_run(run_id).data.params
    assert len(recorded) == 232
    assert recorded["key.229"] == "229"
    assert recorded["long"] == long_value[:6000]
    table = client.load_table(logger.experiment_id, "samples/iteration_0010.json", [run_id])
    assert table["prompt"].tolist() == ["p", "q"]  # the second one replaced the first
    raw = (tmp_path / "got").as_posix()
    (tmp_path / "got").mkdir()
    read = {
        name: Path(client.download_artifacts(run_id, name, raw)).read_bytes()
        for name in (
            "config.yaml",
            "notes/a.txt",
            "figures/empty.png",
            "samples/iteration_0010.json",
        )
    }
    assert read["config.yaml"] == b"a: 1\n"
    assert read["notes/a.txt"] == "text \u0663 ?".encode()
    assert read["figures/empty.png"].startswith(b"\x89PNG")

    def no_constant(name):
        raise ValueError(name)

    table_json = read["samples/iteration_0010.json"]
    data = json.loads(table_json, parse_constant=no_constant)["data"]
    assert data == [["p", 1.0, None], ["q", None, [1, 2]]]


def test_resume_continues_the_run_and_keeps_its_params(tracking):
    first = RunLogger(tracking, run_name="resume")
    first.log_config("lr: 1\n", {"lr": 1})
    first.log_metrics({"actor/entropy": 1.0}, step=1)
    first.log_table([{"a": 1}], "samples/one.json")
    first.close("FAILED")
    client = client_of(tracking)
    assert client.get_run(first.run_id).info.status == "FAILED"

    again = RunLogger(tracking, run_name="ignored", run_id=first.run_id)
    again.finalize()
    assert client.get_run(first.run_id).info.status == "RUNNING"
    again.log_config("lr: 2\n", {"lr": 2})
    again.log_metrics({"actor/entropy": 2.0}, step=2)
    again.log_table([{"a": 2}], "samples/two.json")
    assert again.close() == 0
    assert again.run_id == first.run_id
    run = client.get_run(first.run_id)
    assert run.data.params == {"lr": "1"}
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(first.run_id, "actor/entropy")
    assert [(p.step, p.value) for p in history] == [(1, 1.0), (2, 2.0)]
    for name in ("samples/one.json", "samples/two.json"):
        assert len(client.load_table(again.experiment_id, name, [first.run_id])) == 1
    names = {artifact.path for artifact in client.list_artifacts(first.run_id)}
    assert names >= {"config.yaml", "config_resumed.yaml"}


def test_resume_of_a_run_that_is_not_there_begins_another_one(tracking):
    notes: list[str] = []
    logger = RunLogger(tracking, run_name="x", run_id="0123" * 8, note=notes.append)
    logger.close()
    assert logger.run_id != "0123" * 8
    assert client_of(tracking).get_run(logger.run_id).data.tags["continues"] == "0123" * 8
    assert len(notes) == 1
    assert "01230123" in notes[0]


def test_resume_of_a_run_that_cannot_be_read(tracking):
    with pytest.raises(UserError, match="cannot resume run not/an/id"):
        RunLogger(tracking, run_name="x", run_id="not/an/id")


class _Model(LightningModule):
    def forward(self, x):
        return x


def test_is_a_lightning_logger_that_outlives_a_trainer(tracking):
    logger = RunLogger(tracking, run_name="lightning")
    assert isinstance(logger, Logger)
    trainer = Trainer(logger=logger, accelerator="cpu", enable_checkpointing=False)
    trainer.loggers[0].log_metrics({"a/b": 1.0}, step=3)
    logger.finalize("success")
    client = client_of(tracking)
    assert client.get_run(logger.run_id).data.metrics == {"a/b": 1.0}
    assert client.get_run(logger.run_id).info.status == "RUNNING"
    logger.log_metrics({"a/b": 2.0}, step=4)
    logger.close()
    assert client.get_run(logger.run_id).data.metrics == {"a/b": 2.0}
    with pytest.raises(RuntimeError, match="closed"):
        logger.log_metrics({"a/b": 3.0}, step=5)


@pytest.mark.parametrize(
    ("raised", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_an_exception_ends_the_run_with_its_status(tracking, raised, status):
    with pytest.raises(raised), RunLogger(tracking, run_name="x") as logger:
        raise raised
    assert client_of(tracking).get_run(logger.run_id).info.status == status


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"])
def test_other_ranks_touch_nothing(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    config = TrackingConfig(uri=str(tmp_path / "mlruns"))
    with RunLogger(config, run_name="x", run_id="abc") as logger:
        logger.log_metrics({"a": 1.0}, step=0)
        logger.log_config("", {})
        logger.log_table([{"a": 1}], "a.json")
        logger.finalize()
        assert (logger.run_id, logger.experiment_id) == ("abc", None)
        assert (logger.name, logger.version, logger.save_dir) == (None, "abc", None)
    assert list(tmp_path.iterdir()) == []


def test_describe_names_run_experiment_and_store(tracking):
    logger = RunLogger(tracking, run_name="x")
    logger.close()
    text = logger.describe()
    assert f"MLflow run {logger.run_id}" in text
    assert "'tests'" in text
    assert tracking.uri in text


def test_the_description_begins_with_the_score_and_keeps_the_rest(tracking, tmp_path):
    note = "mlflow.note.content"
    first = RunLogger(tracking, run_name="x", journal=tmp_path, tags={note: "of a sweep"})
    client = client_of(tracking)
    client.set_tag(first.run_id, note, "what the user wrote\n\nmeanwhile")
    first.describe_score("held-out avg@8 10.0 % -> 20.0 %")
    first.close()
    kept = "what the user wrote\n\nmeanwhile"
    tags = client.get_run(first.run_id).data.tags
    assert tags[note] == f"held-out avg@8 10.0 % -> 20.0 %\n\n{kept}"
    with RunLogger(tracking, run_name="x", run_id=first.run_id, journal=tmp_path) as again:
        again.describe_score("held-out avg@8 10.0 % -> 30.0 %")
    tags = client.get_run(first.run_id).data.tags
    assert tags[note] == f"held-out avg@8 10.0 % -> 30.0 %\n\n{kept}"
    with RunLogger(tracking, run_name="y") as bare:
        bare.describe_score("held-out avg@8 1.0 %")
    assert client.get_run(bare.run_id).data.tags[note] == "held-out avg@8 1.0 %"
