"""`vapo fit` under the launchers that start its processes themselves: torchrun and SLURM's srun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.fits import ON_STATE_TRACKING
from tests.integration.commands import (
    ROOT,
    SMALL,
    output_options,
    summary,
    vapo_on_two_ranks,
    vapo_under_srun,
)
from vapo.config.schema import TrainerConfig
from vapo.errors import UserError
from vapo.runs.checkpoints import read_checkpoint
from vapo.system.distributed import check_launch

ONE_ITERATION = [
    "trainer.strategy=fsdp",
    "components.value_pretraining.num_iterations=1",
    "training.num_iterations=1",
    "evaluation.every_n_iterations=100",
]
LAUNCHERS = ("RANK", "WORLD_SIZE", "TORCHELASTIC", "SLURM", "LOCAL_", "GROUP_", "MASTER_", "NODE_")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


def command(tmp_path: Path, *args: str) -> list[str]:
    where = output_options(tmp_path)
    config = [*ON_STATE_TRACKING, *SMALL, *ONE_ITERATION]
    return ["-m", "vapo", "fit", *config, *where, *args]


def start(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return start([*launch, *arguments])


def assert_one_trained_run(tmp_path: Path) -> None:
    """One folder, written by rank 0 alone, with a whole checkpoint of both iterations."""
    (run,) = (tmp_path / "runs").iterdir()
    assert summary(run)["num_iterations"] == 2
    contents = read_checkpoint(run / "checkpoints/last.ckpt")
    assert int(contents["state_dict"]["policy_steps"]) == 2
    assert (run / "pretrained_critic/model.safetensors").is_file()


@pytest.mark.night  # tests/runs/test_two_processes.py has the same variables, forked
def test_torchrun(tmp_path: Path) -> None:
    process = torchrun(*command(tmp_path, "trainer.devices=2"))
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-4000:]
    assert_one_trained_run(tmp_path)
    assert out.count("run folder:") == 1


@pytest.mark.night  # test_sharded_fit.py has a run that is resumed so
def test_srun(tmp_path: Path) -> None:
    """Two processes with the variables that srun gives them."""
    result = vapo_under_srun(*command(tmp_path, "trainer.devices=2")[2:])
    assert result.returncode == 0, result.stderr[-4000:]
    assert_one_trained_run(tmp_path)


@pytest.mark.slow
def test_torchrun_with_another_number_of_processes_is_one_clear_error(tmp_path: Path) -> None:
    result = vapo_on_two_ranks(*command(tmp_path, "trainer.devices=1")[2:])
    assert result.returncode == 2
    expected = "vapo: torchrun started 2 processes (2 on each host), but trainer.devices is 1"
    assert expected in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("environment", "trainer", "fix"),
    [
        (
            {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"},
            TrainerConfig(devices=16),
            "trainer.devices=8 trainer.num_nodes=2 trainer.strategy=fsdp",
        ),
        (
            {"SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_NAME": "train"},
            TrainerConfig(devices=8),
            "trainer.devices=8 trainer.num_nodes=2",
        ),
        (
            {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train"},
            TrainerConfig(devices=2, strategy="fsdp"),
            "trainer.devices=1 trainer.num_nodes=1",
        ),
    ],
)
def test_processes_and_config_must_agree(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    trainer: TrainerConfig,
    fix: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=fix):
        check_launch(trainer)


def test_agreement_and_no_launcher_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    check_launch(TrainerConfig(devices=3))
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    check_launch(TrainerConfig(devices=3))
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    check_launch(TrainerConfig(devices=2, num_nodes=2, strategy="fsdp"))
