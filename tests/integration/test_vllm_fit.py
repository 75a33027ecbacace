"""`vapo fit` and `vapo validate` with the vLLM engine, by the real command."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.integration.commands import ROOT, SMALL, fit, store, summary, vapo
from tests.tiny_model import save_tiny_folder
from tests.vllm_engine import vllm_model
from vapo.checkpoints import network_state, read_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("policy") / "folder", vllm_model())


def options(policy: Path) -> list[str]:
    return [
        f"actor.path={policy}",
        "critic.init=policy",
        "rollouts.engine=vllm",
        "rollouts.vllm.kv_cache_memory_bytes=33554432",
        "rollouts.max_concurrent_sequences=64",
    ]


def metric(run: Path, tmp_path: Path, key: str) -> list[float]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store(tmp_path)}/mlflow.db")
    return [m.value for m in client.get_metric_history(summary(run)["mlflow_run_id"], key)]


def test_fit_validate_and_resume(policy: Path, tmp_path: Path) -> None:
    """Both phases; the gap stays at rounding; a killed run goes on and ends in equal weights."""
    run = fit(tmp_path / "whole", *options(policy))
    gaps = metric(run, tmp_path / "whole", "rollout/logprob_gap_mean")
    assert len(gaps) == 3, "one for each policy iteration"
    assert 0 < max(gaps) < 1e-5
    checkpoint = run / "checkpoints/last.ckpt"
    scored = vapo(
        "validate",
        *("--config", "conf/vapo.yaml"),
        *SMALL,
        *options(policy),
        *("--ckpt_path", str(checkpoint)),
    )
    assert scored.returncode == 0, scored.stderr
    lines = dict(line.split(": ") for line in scored.stdout.splitlines() if ": " in line)
    assert float(lines["eval/avg_at_k"]) == pytest.approx(summary(run)["score_after"], abs=1e-4)

    where = [f"output_dir={tmp_path / 'cut/runs'}", f"tracking.uri={store(tmp_path / 'cut')}"]
    command = [sys.executable, "-u", "-m", "vapo", "fit", "--config", "conf/vapo.yaml"]
    process = subprocess.Popen(
        [*command, *SMALL, *where, *options(policy)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    seen = 0
    for line in process.stdout:
        seen += line.startswith("iteration")
        if seen == 4:
            break
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = fit(tmp_path / "cut", *options(policy), "--ckpt_path", "last")
    whole, cut = (
        network_state(read_checkpoint(r / "checkpoints/last.ckpt"), "actor") for r in (run, resumed)
    )
    for name, tensor in whole.items():
        assert torch.allclose(tensor, cut[name], atol=1e-6), name


def test_a_cache_that_is_too_small_says_so(policy: Path, tmp_path: Path) -> None:
    result = vapo(
        "fit",
        *("--config", "conf/vapo.yaml"),
        *SMALL,
        *options(policy),
        f"output_dir={tmp_path / 'runs'}",
        f"tracking.uri={store(tmp_path)}",
        "rollouts.vllm.kv_cache_memory_bytes=1000",
    )
    assert result.returncode == 2
    assert "vapo: the vLLM engine could not start" in result.stderr
    assert "kv_cache_memory_bytes" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_mistyped_engine_argument_names_the_nearest(policy: Path, tmp_path: Path) -> None:
    result = vapo(
        "fit",
        *("--config", "conf/vapo.yaml"),
        *SMALL,
        *options(policy),
        f"output_dir={tmp_path / 'runs'}",
        f"tracking.uri={store(tmp_path)}",
        "rollouts.vllm.engine_args.max_num_batched_token=64",
    )
    assert result.returncode == 2
    assert "did you mean max_num_batched_tokens?" in result.stderr
