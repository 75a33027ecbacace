"""`import vapo`: the stable names do what the commands do."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import save_file

import vapo
from tests.config.fits import ROOT
from tests.integration.commands import SHORT, output_options, store
from vapo.config.written import flatten
from vapo.runs.checkpoints import read_checkpoint

pytestmark = [
    pytest.mark.slow,  # two trainings, and processes of their own
    pytest.mark.usefixtures("in_the_repository"),
]

CONFIG = ROOT / "conf/state_tracking/vapo.yaml"
POLICY_ITERATIONS, PRETRAINING_ITERATIONS = 3, 2


class EpochCounter(Callback):
    """A callback of a user's own, with a state."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}


def judge() -> None:
    """Only its name is used."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[vapo.Run, EpochCounter, Path]:
    """A small run, with the user's own callback and logger."""
    folder = tmp_path_factory.mktemp("python")
    where = output_options(folder)
    counter = EpochCounter()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        config = vapo.load_config(CONFIG, overrides=[*SHORT, *where])
        run = vapo.fit(config, callbacks=[counter], loggers=[CSVLogger(folder, "mine")])
    return run, counter, folder


def test_importing_it_and_loading_a_config_do_not_load_torch() -> None:
    code = (
        "import sys, vapo; config = vapo.load_config('conf/vapo.yaml', overrides={'seed': 3}); "
        "assert config.seed == 3; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_name_is_there_and_documented() -> None:
    for name in vapo.__all__:
        assert inspect.getdoc(getattr(vapo, name)), name
        assert name in dir(vapo)
    with pytest.raises(AttributeError, match="no attribute 'fti'"):
        _ = vapo.fti


def test_overrides_are_a_list_or_a_mapping() -> None:
    mapping = {
        "seed": 3,
        "actor.optimizer.lr": 1e-6,
        "data.chat_template": True,
        "critic.anchors": [0.5, 1.0],
        "tracking.run_name": None,
        "data.train.options": {"min_steps": 7},
        "rewards.verifier": "python",
        "rewards.function": judge,
    }
    listed = [
        *("seed=3", "actor.optimizer.lr=1e-6", "data.chat_template=true"),
        *("critic.anchors=[0.5, 1.0]", "tracking.run_name=null"),
        *("data.train.options={min_steps: 7}", "rewards.verifier=python"),
        f"rewards.function={__name__}:judge",
    ]
    by_mapping = vapo.load_config("conf/vapo.yaml", overrides=mapping)
    assert by_mapping == vapo.load_config("conf/vapo.yaml", overrides=listed)
    with pytest.raises(vapo.UserError, match="unknown key 'sede'; did you mean 'seed'"):
        vapo.load_config("conf/vapo.yaml", overrides={"sede": 3})


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        ({"output_dir": Path("/tmp/a b")}, "output_dir", "/tmp/a b"),
        ({"seed": np.int64(3)}, "seed", 3),
        ({"actor.optimizer.lr": torch.tensor(0.5)}, "actor.optimizer.lr", 0.5),
        (
            {"components.clip_higher": {"enabled": np.bool_(False)}},
            "components.clip_higher.enabled",
            False,
        ),
        ({"critic.anchors": (0.5, 1)}, "critic.anchors", "[0.5, 1.0]"),
        ({"tracking.tags": {"a": "\U0001f600\u00e9"}}, "tracking.tags.a", "\U0001f600\u00e9"),
    ],
)
def test_values_of_python_become_those_of_the_config(
    overrides: dict[str, Any], key: str, value: Any
) -> None:
    found = flatten(vapo.load_config("conf/vapo.yaml", overrides=overrides))[key]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("seed=3", "give a list of 'key=value' or a mapping, not 'seed=3'"),
        ({"output_dir": len}, "output_dir: this key does not take a function"),
        ({"seed": object()}, "seed: a config cannot hold a value of type object"),
    ],
)
def test_other_overrides_are_one_error(overrides: Any, said: str) -> None:
    with pytest.raises(vapo.UserError, match=said):
        vapo.load_config("conf/vapo.yaml", overrides=overrides)


def test_the_rate_of_a_small_model_is_refused_for_a_large_one(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    save_file({"w": torch.zeros(5_000_000)}, tmp_path / "model.safetensors")
    overrides = {"actor.path": tmp_path, "output_dir": tmp_path / "runs"}
    config = vapo.load_config("conf/vapo.yaml", overrides=overrides)
    refused = pytest.raises(vapo.UserError, match="a rate for a small model destroys a large one")
    with refused:
        vapo.fit(config)
    with refused, vapo.training_parts(config):
        pass


def test_errors_have_no_secret_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_PASSWORD", "hunter2secret")
    path = "${oc.env:NODE_PASSWORD}/nope/x"
    config = vapo.load_config("conf/vapo.yaml", overrides={"actor.path": path})
    for call in (vapo.fit, vapo.validate):
        with pytest.raises(vapo.UserError) as raised:
            call(config)
        assert "hunter2secret" not in str(raised.value)


class Dated(Callback):
    """Its state would make a checkpoint unreadable."""

    def state_dict(self) -> dict[str, Any]:
        return {"since": [timedelta(1)]}


def test_a_state_that_a_checkpoint_cannot_have_is_refused_before_one_is_written(
    tmp_path: Path,
) -> None:
    where = [f"output_dir={tmp_path}", f"tracking.uri={store(tmp_path)}"]
    config = vapo.load_config(CONFIG, overrides=[*SHORT, *where])
    with pytest.raises(vapo.UserError, match="callback Dated has a timedelta in its state_dict"):
        vapo.fit(config, callbacks=[Dated()])
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_run_says_what_its_summary_and_record_say(
    made: tuple[vapo.Run, EpochCounter, Path],
) -> None:
    run, _, _ = made
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (run.score_before, run.score_after) == (summary["score_before"], summary["score_after"])
    assert run.config.training.num_iterations == POLICY_ITERATIONS
    score = run.metrics()["eval/avg_at_k"]
    assert [step for step, _ in score] == sorted(step for step, _ in score)
    assert score[-1][1] == pytest.approx(run.score_after)
    assert run.value_pages()
    assert all(page.read_text().startswith("<!") for page in run.value_pages())
    assert vapo.open_run(run.folder) == run
    with pytest.raises(vapo.UserError, match=r"summary\.json: no such file"):
        vapo.open_run(run.folder / "checkpoints")


def test_own_callbacks_are_called_and_their_state_is_in_the_checkpoint(
    made: tuple[vapo.Run, EpochCounter, Path],
) -> None:
    run, counter, _ = made
    assert counter.epochs == PRETRAINING_ITERATIONS + POLICY_ITERATIONS
    contents = read_checkpoint(run.folder / "checkpoints/last.ckpt")
    (state,) = (s for name, s in contents["callbacks"].items() if "EpochCounter" in name)
    assert state == {"epochs": counter.epochs}


def test_own_loggers_get_the_metrics(made: tuple[vapo.Run, EpochCounter, Path]) -> None:
    _, _, folder = made
    (table,) = (folder / "mine").rglob("metrics.csv")
    assert "eval/avg_at_k" in table.read_text().splitlines()[0].split(",")


def test_a_plain_trainer_trains_the_same_weights(
    made: tuple[vapo.Run, EpochCounter, Path], tmp_path: Path
) -> None:
    """The parts by themselves, without evaluation, records and checkpoints."""
    run, _, _ = made
    config = vapo.load_config(run.folder / "config.yaml", overrides={"output_dir": str(tmp_path)})
    with vapo.training_parts(config) as parts:
        trainer = L.Trainer(
            **parts.trainer_options,
            callbacks=parts.callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(parts.module, parts.datamodule)
    expected = read_checkpoint(run.folder / "checkpoints/last.ckpt")["state_dict"]
    found = parts.module.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].cpu(), tensor), name
    assert (tmp_path / "pretrained_critic/model.safetensors").is_file()


def test_what_does_not_fit_is_one_error_before_anything_is_written(tmp_path: Path) -> None:
    config = vapo.load_config(
        "conf/vapo.yaml", overrides={"output_dir": str(tmp_path / "runs"), "actor.path": "nowhere"}
    )
    with pytest.raises(vapo.UserError, match="nowhere"):
        vapo.fit(config)
    assert not (tmp_path / "runs").exists()


def test_report_needs_to_know_which_runs() -> None:
    with pytest.raises(vapo.UserError, match="needs one of sweep=, runs=, experiment="):
        vapo.report()
