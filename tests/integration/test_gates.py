"""`vapo gates` on the small policy: the whole command, and what a trial run freezes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import mlflow
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.config.fits import ON_STATE_TRACKING, STATE_TRACKING
from tests.integration.commands import SHORT, SMALL, output_options, store, vapo
from tests.tracking.metric_docs import documented_keys
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.networks.loading import load_tokenizer, load_value_model
from vapo.prompts.load import load_prompts
from vapo.rewards.scorer import make_scorer
from vapo.studies.gates import measuring
from vapo.studies.gates.measuring import trial_run
from vapo.system.progress import Progress
from vapo.training.parts import Inputs, Sampling

BASE = ("gates", *ON_STATE_TRACKING, *SMALL)
N = 3


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    args = ["--answer_now", ";", "--num_iterations", str(N)]
    result = vapo(*BASE, *output_options(tmp_path), *args)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    folder = tmp_path / "runs" / "gates"
    lines = result.stdout.strip().splitlines()
    assert lines[-1] == str(folder)
    shown = lines[next(i for i, line in enumerate(lines) if line.startswith("mean reward")) : -3]
    assert max(map(len, shown)) <= 100
    assert "up to 384 rollouts" in result.stdout  # 2 + 3 + 3 + 4 iterations of 32
    found = json.loads((folder / "gates.json").read_text())
    figures, curves = found["figures"], found["curves"]
    # the start, and after each iteration
    assert len(curves["explained_variance"]) == len(curves["value_pretraining"]) == 3
    assert curves["value_pretraining"][0] == curves["value_unlearning"][0] == figures["value_start"]
    assert curves["value_pretraining"][-1] == figures["value_pretrained"]
    assert len(curves["value_unlearning"]) <= N + 1
    assert len(curves["response_length"]) <= N + 1
    # 8 of 128 prompts an iteration, 3 iterations
    assert figures["prompt_visits"] == 3 * 8 / 128
    assert figures["share_returned"] == 0
    # one wrong step of a few is not yet seen, and the table of states knows it
    assert figures["explained_variance_oracle"] > 0.2
    guess = figures["guess"]
    assert -1 <= guess["mean"] <= 1
    assert guess["low"] < guess["mean"] < guess["high"]
    page = (folder / "gates.md").read_text()
    assert "| value pretraining | **cannot show** |" in page  # alpha 2
    assert found["verdicts"]["value pretraining"] == "cannot show"
    assert (folder / "gates.png").stat().st_size > 10_000
    load_value_model(
        str(folder / "pretrained_critic"), dtype="float32", attn_implementation="sdpa"
    )  # a start for other runs
    check_record(store(tmp_path), curves)


def check_record(uri: Path, curves: dict[str, list[float]]) -> None:
    client = mlflow.MlflowClient(f"sqlite:///{uri / 'mlflow.db'}")
    ids = [e.experiment_id for e in client.search_experiments()]
    (run,) = client.search_runs(ids, "tags.command = 'gates'", max_results=1)
    run_id = run.info.run_id
    for key, name in {
        "gates/heldout_explained_variance": "explained_variance",
        "gates/value_middle_unlearning": "value_unlearning",
        "gates/response_length_mean": "response_length",
    }.items():
        history = sorted((m.step, m.value) for m in client.get_metric_history(run_id, key))
        assert [value for _, value in history] == pytest.approx(curves[name])
    assert set(run.data.metrics) <= documented_keys()
    assert run.data.tags["gates/value pretraining"] == "cannot show"
    names = {artifact.path for artifact in client.list_artifacts(run_id)}
    assert {"gates.md", "gates.json", "gates.png"} <= names


@pytest.mark.night
def test_without_a_guess_and_without_pretraining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is trained for what cannot be said, and the output says so."""
    trials: list[Sequence[str]] = []
    real = measuring.trial_run

    def counted(*args: Any, **kwargs: Any) -> Any:
        trials.append(kwargs.get("trained", ["actor", "critic"]))
        return real(*args, **kwargs)

    monkeypatch.setattr(measuring, "trial_run", counted)
    off = "components.value_pretraining.enabled=false"
    result = vapo(*BASE, *output_options(tmp_path), off, "--num_iterations", "1")
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert trials == [["actor", "critic"], ["actor"]]
    assert result.stdout.count("not measured: no --answer_now") == 2
    found = json.loads((tmp_path / "runs/gates/gates.json").read_text())
    assert found["figures"]["explained_variance_pretrained"] is None
    assert found["verdicts"]["critic against groups"] == "open"
    assert len(found["curves"]["explained_variance"]) == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--config", "conf/algorithm/grpo.yaml"], "has no critic"),
        (["rewards.shuffle=true"], "rewards.shuffle"),
        (["--answer_now", "Therefore"], "--answer_now 'Therefore'"),
    ],
)
def test_what_it_cannot_do_is_said_at_once(
    tmp_path: Path, args: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vapo.commands.gates.sample_start", None)
    result = vapo(*BASE, *output_options(tmp_path), *args)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr
    assert not (tmp_path / "runs").exists()


# ---- the trial runs -------------------------------------------------------------------------


class Start(Callback):
    """Keeps the networks' weights as the trial run begins."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        state = pl_module.state_dict()
        self.weights = {name: tensor.clone() for name, tensor in state.items()}

    def moved(self, module: L.LightningModule) -> dict[str, bool]:
        now = module.state_dict()
        return {
            network: any(
                not torch.equal(now[name], tensor)
                for name, tensor in self.weights.items()
                if name.startswith(f"{network}.")
            )
            for network in ("actor", "critic")
        }


@pytest.fixture(scope="module")
def setting() -> Any:
    config = load_config(FitConfig, STATE_TRACKING, [*SHORT, "critic.minibatch_size=8"])
    tokenizer = load_tokenizer(config.actor.path)
    with make_scorer(config) as scorer:
        inputs = Inputs(tokenizer, load_prompts(config.data, tokenizer))
        yield Sampling(config, inputs, scorer, Progress(enabled=False))


@pytest.mark.parametrize(
    ("trained", "moved"),
    [
        (["critic"], {"actor": False, "critic": True}),
        pytest.param(["actor"], {"actor": True, "critic": False}, marks=pytest.mark.night),
        pytest.param(["actor", "critic"], {"actor": True, "critic": True}, marks=pytest.mark.slow),
    ],
)
def test_what_is_not_trained_does_not_move(
    setting: Sampling, trained: list[str], moved: dict[str, bool]
) -> None:
    start = Start()
    module = trial_run(setting, start, num_policy_iterations=2, trained=trained)
    assert start.moved(module) == moved
    assert int(module.policy_iterations) == 2  # more than the config's own number may be


@pytest.mark.slow
def test_a_trial_run_may_sample_ahead(setting: Sampling) -> None:
    own = replace(setting.config.training, max_staleness=1)
    ahead = replace(setting, config=replace(setting.config, training=own))
    module = trial_run(ahead, Start(), num_policy_iterations=2)
    assert int(module.policy_iterations) == 2
