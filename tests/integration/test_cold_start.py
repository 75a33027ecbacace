"""`vapo sft` and `vapo reward-model`: seeded, and their folders are what `vapo fit` starts from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.commands import ROOT, store, vapo

SFT = [
    "num_steps=40",
    "batch_size=16",
    "new_model.hidden_size=32",
    "new_model.num_layers=1",
    "optimizer.warmup_steps=5",
    "data.train.num_examples=256",
    "data.heldout.num_examples=8",
    "evaluation.k=1",
    "trainer.num_threads=1",
]


def sft(tmp_path: Path, name: str, *args: str) -> Path:
    folder = tmp_path / name
    result = vapo(
        "sft",
        *("--config", "conf/state_tracking/sft.yaml"),
        *SFT,
        f"export_dir={folder}",
        f"tracking.uri={store(tmp_path)}",
        *args,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip().splitlines()[-1] == str(folder)
    return folder


@pytest.mark.slow
def test_sft_learns_and_is_seeded_and_the_reward_model_starts_from_it(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    first, again = sft(tmp_path, "first"), sft(tmp_path, "again")
    weights, repeated = (load_file(f / "model.safetensors") for f in (first, again))
    assert all(torch.equal(weights[name], repeated[name]) for name in weights)

    client = MlflowClient(f"sqlite:///{store(tmp_path)}/mlflow.db")
    experiment = client.get_experiment_by_name("cold-start")
    assert experiment is not None
    run = client.search_runs([experiment.experiment_id])[0]
    losses = [m.value for m in client.get_metric_history(run.info.run_id, "sft/loss")]
    assert losses[-1] < 0.8 * losses[0]

    folder = tmp_path / "reward_model"
    result = vapo(
        "reward-model",
        *("--config", "conf/state_tracking/reward_model.yaml"),
        f"policy_path={first}",
        f"export_dir={folder}",
        f"tracking.uri={store(tmp_path)}",
        *("num_steps=2", "batch_size=8", "data.train.num_examples=32"),
        *("data.heldout.num_examples=8", "trainer.num_threads=1"),
    )
    assert result.returncode == 0, result.stderr[-3000:]
    backbone = load_file(folder / "model.safetensors")
    assert backbone["score.weight"].abs().sum() > 0, "the head starts at 0 and is trained"


@pytest.mark.slow
def test_a_generation_config_does_not_lose_a_training(tmp_path: Path) -> None:
    """Transformers loads such a file and refuses to save it."""
    start = tmp_path / "start"
    shutil.copytree(ROOT / "models/state_tracking/policy", start)
    content = b'{"eos_token_id": 1, "temperature": 0.6, "top_p": 0.9}'
    (start / "generation_config.json").write_bytes(content)
    folder = sft(tmp_path, "trained", f"model_path={start}", "num_steps=1", "batch_size=4")
    assert (folder / "generation_config.json").read_bytes() == content
    before, after = (load_file(f / "model.safetensors") for f in (start, folder))
    assert before.keys() == after.keys()
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in start.iterdir())


def test_demonstrations_are_required(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "3a12=", "answer": "3"}\n' * 3)
    result = vapo(
        "sft",
        *("--config", str(ROOT / "conf/state_tracking/sft.yaml")),
        *SFT,
        f"export_dir={tmp_path / 'out'}",
        f"tracking.uri={store(tmp_path)}",
        *("data.train.kind=jsonl", f"data.train.path={rows}", "data.train.num_examples=3"),
    )
    assert result.returncode == 2
    assert "data.train.demonstration_column" in result.stderr
    assert "Traceback" not in result.stderr
