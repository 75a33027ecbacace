"""`vapo fit` and `vapo validate` with the vLLM engine, by the real command."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.config.fits import ON_STATE_TRACKING
from tests.integration import commands
from tests.integration.commands import (
    ROOT,
    SMALL,
    final_weights,
    output_options,
    store,
    summary,
    vapo_process,
)
from tests.recorded_metrics import metric_values
from tests.tiny_model import save_tiny_folder
from tests.vllm_engine import vllm_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
fit = partial(commands.fit, run=vapo_process)  # the engine ends with its process


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


def start_fit(tmp_path: Path, *args: str) -> subprocess.Popen[str]:
    where = output_options(tmp_path)
    command = [sys.executable, "-u", "-m", "vapo", "fit", *ON_STATE_TRACKING]
    return subprocess.Popen(
        [*command, *SMALL, *where, *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_iteration(process: subprocess.Popen[str], number: int) -> None:
    """Until its line is printed, when it has ended and the next one begins."""
    assert process.stdout is not None
    seen = 0
    for line in process.stdout:
        seen += line.startswith("iteration")
        if seen == number:
            return
    raise AssertionError(f"the run ended early: {process.stderr and process.stderr.read()}")


def assert_same_actor(run: Path, other: Path) -> None:
    one, two = (final_weights(r, "actor") for r in (run, other))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-6), name


@pytest.fixture(scope="module")
def whole_run(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    return fit(tmp_path_factory.mktemp("whole"), *options(policy))


def test_fit_validate_and_resume(policy: Path, whole_run: Path, tmp_path: Path) -> None:
    """Both phases; the gap stays at rounding; a killed run is resumed and ends in equal weights."""
    gaps = metric_values(whole_run, "rollout/logprob_gap_mean")
    assert len(gaps) == 3, "one for each policy iteration"
    assert 0 < max(gaps) < 1e-5
    scored = vapo_process(
        "validate",
        *ON_STATE_TRACKING,
        *SMALL,
        *options(policy),
        *("--ckpt_path", str(whole_run / "checkpoints/last.ckpt")),
    )
    assert scored.returncode == 0, scored.stderr
    lines = dict(line.split(": ") for line in scored.stdout.splitlines() if ": " in line)
    expected = summary(whole_run)["score_after"]
    assert float(lines["eval/avg_at_k"]) == pytest.approx(expected, abs=1e-4)

    process = start_fit(tmp_path, *options(policy))
    wait_for_iteration(process, 4)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = fit(tmp_path, *options(policy), "--ckpt_path", "last")
    assert_same_actor(whole_run, resumed)


def test_vllms_output_is_in_the_runs_folder_and_its_start_is_a_stage(whole_run: Path) -> None:
    assert "Initializing a V1 LLM engine" in (whole_run / "logs/vllm.log").read_text()
    (seconds,) = metric_values(whole_run, "time/engine_start_s")
    assert seconds == pytest.approx(summary(whole_run)["stage_seconds"]["engine_start"])
    assert len(metric_values(whole_run, "time/checkpoint_s")) == 4, "after the first iteration"


@pytest.mark.parametrize("parts", [1, 2])
def test_two_sharded_processes(tmp_path: Path, parts: int) -> None:
    """An engine in each process, or one for both; weights are gathered from the shards."""
    policy = save_tiny_folder(tmp_path / "policy", vllm_model(num_key_value_heads=2))
    run = fit(
        tmp_path,
        *options(policy),
        f"rollouts.vllm.tensor_parallel_size={parts}",
        "trainer.devices=2",
        "trainer.strategy=fsdp",
        "evaluation.every_n_iterations=100",
    )
    gaps = metric_values(run, "rollout/logprob_gap_mean")
    assert len(gaps) == 3
    assert 0 < max(gaps) < 1e-5
    changed = final_weights(run, "actor")
    before = vllm_model(num_key_value_heads=2).state_dict()
    assert any(not torch.equal(changed[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            "rollouts.vllm.kv_cache_memory_bytes=1000",
            [
                "vapo: the vLLM engine could not start",
                "kv_cache_memory_bytes",
                "; the whole traceback is in ",
            ],
        ),
        (
            "rollouts.vllm.engine_args.max_num_batched_token=64",
            ["did you mean max_num_batched_tokens?"],
        ),
    ],
)
def test_options_that_cannot_work(
    policy: Path, tmp_path: Path, option: str, said: list[str]
) -> None:
    where = output_options(tmp_path)
    result = vapo_process("fit", *ON_STATE_TRACKING, *SMALL, *options(policy), *where, option)
    assert result.returncode == 2
    for text in said:
        assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert "WARNING" not in result.stdout + result.stderr
    (_, _, path) = result.stderr.strip().rpartition("the whole traceback is in ")
    if "could not start" in result.stderr:
        assert Path(path).parent.parent.parent == tmp_path / "runs"
        assert "Traceback (most recent call last)" in Path(path).read_text()


@pytest.mark.parametrize(
    ("name", "file", "given"),
    [
        ("sft", "conf/state_tracking/sft.yaml", ["model_path", "num_steps=2", "evaluation.k=1"]),
        ("reward-model", "conf/state_tracking/reward_model.yaml", ["policy_path", "num_steps=2"]),
    ],
)
def test_supervised_commands_sample_with_it(
    policy: Path, tmp_path: Path, name: str, file: str, given: list[str]
) -> None:
    """A folder and a score; an option that the engine does not have is known before training."""
    key, *more = given
    common = [
        *(f"{key}={policy}", *more, "batch_size=8", f"tracking.uri={store(tmp_path)}"),
        *("data.train.num_examples=64", "data.heldout.num_examples=8"),
        *(option for option in options(policy) if option.startswith("rollouts.")),
        f"export_dir={tmp_path / 'out'}",
    ]
    wrong = "rollouts.vllm.engine_args.max_num_batched_token=64"
    refused = vapo_process(name, "--config", file, *common, wrong)
    assert refused.returncode == 2
    assert "did you mean max_num_batched_tokens?" in refused.stderr
    assert "training" not in refused.stdout
    done = vapo_process(name, "--config", file, *common)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out" / "model.safetensors").is_file()
