"""Runs on environments: hostile ones cost their episodes, a kill costs nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.integration.commands import SHORTEST, SMALL, output_options, store, vapo
from tests.recorded_metrics import metric_values
from tests.runs import runs
from tests.runs.comparing import assert_same
from vapo import cli

ENVIRONMENTS = Path(__file__).with_name("acting_environments.py")
TUG_OF_WAR = (
    *("--config", "conf/tug_of_war/vapo.yaml"),
    *("environment.args.num_turns=8", "environment.max_turns=9"),
)
TINY = [
    *SMALL,
    "components.value_pretraining.num_iterations=1",
    "training.num_iterations=2",
    "evaluation.num_prompts=4",
    "actor.optimizer.lr=1e-3",
    "actor.optimizer.warmup_steps=0",
]


@pytest.mark.attacks  # tests/environments/test_hostile_environments.py attacks without a run
def test_a_hostile_environment_costs_its_episodes_alone(tmp_path: Path) -> None:
    """In groups of one, so that no fair episode is left out with its group."""
    result = vapo(
        "fit",
        *TUG_OF_WAR,
        *TINY,
        *("components.group_sampling.enabled=false", "environment.timeout_s=6"),
        f"environment.function={ENVIRONMENTS}:Hostile",
        *output_options(tmp_path),
    )
    assert result.returncode == 0, result.stderr[-3000:]
    run = Path(result.stdout.strip().splitlines()[-1])
    left_out = metric_values(run, "faults/rollouts_left_out")
    assert len(left_out) == 3
    assert all(number <= 24 for number in left_out)
    assert sum(left_out) > 0  # 0 by chance once in 10^12 runs
    assert metric_values(run, "actor/grad_norm"), "the others are trained on"
    assert "the environment failed" in result.stdout


@pytest.mark.slow
def test_an_environment_that_never_works_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    result = vapo(
        "fit",
        *TUG_OF_WAR,
        *SHORTEST,
        *("rollouts.max_response_tokens=96", "evaluation.num_prompts=4"),
        f"environment.function={ENVIRONMENTS}:Broken",
        *output_options(tmp_path),
    )
    assert result.returncode == 2
    last = result.stderr.strip().splitlines()[-1]
    assert "Broken gave no verdict on any of" in last
    assert "ValueError: no such place" in last


@pytest.mark.kills
def test_killed_in_the_middle_of_episodes(tmp_path: Path) -> None:
    """And resumed, it has the weights of a run that nothing stopped."""
    own = [f"environment.function={ENVIRONMENTS}:Slow", *TUG_OF_WAR, *TINY]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    kept = store(tmp_path)

    def arguments(folder: Path) -> list[str]:
        return [*own, *runs.where(folder, kept), "checkpoints.resume=auto"]

    assert runs.end(start(whole, arguments(whole))) == 0, log(whole)
    process = start(killed, arguments(killed))
    deadline = time.monotonic() + 200
    while not list(killed.glob("runs/*/checkpoints/last.ckpt")):
        assert time.monotonic() < deadline, log(killed)
        assert process.is_alive(), log(killed)
        time.sleep(0.05)
    time.sleep(0.2)  # the next iteration's episodes are under way
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert runs.end(process) == -signal.SIGKILL
    assert runs.end(start(killed, arguments(killed))) == 0, log(killed)
    assert_same(
        runs.state(runs.only_run(killed))["state_dict"],
        runs.state(runs.only_run(whole))["state_dict"],
    )


def start(folder: Path, arguments: list[str]) -> Any:
    return forked.start(folder / "log.txt", {}, _fit, arguments)


def _fit(arguments: list[str]) -> int:
    return cli.main(["fit", *arguments])


def log(folder: Path) -> str:
    return (folder / "log.txt").read_text()[-3000:]


@pytest.mark.slow
def test_vapo_try_shows_the_turns(tmp_path: Path) -> None:
    result = vapo("try", *TUG_OF_WAR, "--num", "2", *output_options(tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]
    assert "[policy, turn 1, reward 0]" in result.stdout
    assert "[environment, before turn 2]" in result.stdout
    assert "verifier" not in result.stdout
