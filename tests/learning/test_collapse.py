"""The paper's two largest effects, on checked steps and one seed: without value pretraining, and
vanilla PPO. docs/ablation.md explains both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.commands import output_options, summary, vapo_process
from tests.recorded_metrics import metric_values

pytestmark = [pytest.mark.learning, pytest.mark.timeout(900)]

SETTINGS = (
    *("--config", "conf/missed_checks/vapo.yaml"),
    "components.value_pretraining.num_iterations=30",
    "evaluation.k=4",
    "evaluation.every_n_iterations=12",
    "seed=2",
)


def test_vapo_learns_where_it_collapses_without_value_pretraining(tmp_path: Path) -> None:
    before, after, length, _ = train(tmp_path / "vapo")
    assert before < 0.50
    assert after > before + 0.25
    assert length > 30, "it works the steps out"
    off = "components.value_pretraining.enabled=false"
    _, without, shorter, first_value = train(tmp_path / "without", off)
    assert first_value < -0.8, "the reward model takes unfinished work for wrong"
    assert without < after - 0.20
    assert shorter < length - 5, "guesses: a guess is worth more than that"


def test_vanilla_ppo_gives_up_working_the_steps_out(tmp_path: Path) -> None:
    before, after, length, first_value = train(
        tmp_path, "--config", "conf/algorithm/ppo.yaml", "algorithm.lambda_policy=0.1"
    )
    assert first_value < -0.8
    assert after < before - 0.15
    assert length < 10


def train(folder: Path, *args: str) -> tuple[float, float, float, float]:
    """Score before and after, the last responses' mean length, the critic's first value."""
    folder.mkdir(exist_ok=True)
    result = vapo_process("fit", *SETTINGS, *output_options(folder), *args, timeout_s=850)
    assert result.returncode == 0, result.stderr[-4000:]
    run = Path(result.stdout.strip().splitlines()[-1])
    contents = summary(run)
    lengths, values = (
        metric_values(run, key)
        for key in ("rollout/response_length_mean", "critic/value_first_token_mean")
    )
    return contents["score_before"], contents["score_after"], lengths[-1], values[0]
