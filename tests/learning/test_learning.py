"""Training raises the held-out score, and cannot when the rewards are shuffled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.commands import summary, vapo_process

pytestmark = [pytest.mark.learning, pytest.mark.timeout(900)]


def train(tmp_path: Path, *args: str) -> tuple[float, float]:
    result = vapo_process(
        "fit",
        *("--config", "conf/vapo.yaml"),
        f"output_dir={tmp_path / 'runs'}",
        f"tracking.uri={tmp_path / 'mlruns'}",
        *args,
        timeout_s=850,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    contents = summary(Path(result.stdout.strip().splitlines()[-1]))
    return contents["score_before"], contents["score_after"]


def test_default_run_learns_with_a_critic_that_knows_something(tmp_path: Path) -> None:
    before, after = train(tmp_path)
    assert before < 0.60
    assert after >= 0.80
    (critic,) = (tmp_path / "runs").glob("*/pretrained_critic")
    result = vapo_process(
        "validate",
        *("--config", "conf/vapo.yaml", f"critic.init={critic}"),
        *("--value_page", str(tmp_path / "page.html")),
        f"tracking.uri={tmp_path / 'mlruns'}",
    )
    assert result.returncode == 0, result.stderr[-4000:]
    (known,) = re.findall(r"critic/explained_variance: (\S+)", result.stdout)
    assert float(known) >= 0.3


def test_a_probe_learns_and_comes_to_know_something(tmp_path: Path) -> None:
    """A head on the policy's own states, after value pretraining, on held-out prompts."""
    probe = ("--config", "conf/algorithm/probe.yaml")
    before, after = train(tmp_path, *probe)
    assert after >= before + 0.1
    (critic,) = (tmp_path / "runs").glob("*/pretrained_critic")
    known = {}
    for name, init in (("start", "policy"), ("pretrained", str(critic))):
        result = vapo_process(
            "validate",
            *("--config", "conf/vapo.yaml", *probe, f"critic.init={init}"),
            *("--value_page", str(tmp_path / "page.html")),
            f"tracking.uri={tmp_path / 'mlruns'}",
        )
        assert result.returncode == 0, result.stderr[-4000:]
        (known[name],) = re.findall(r"critic/explained_variance: (\S+)", result.stdout)
    assert abs(float(known["start"])) < 0.01
    assert float(known["pretrained"]) >= 0.25


def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    before, after = train(tmp_path, "rewards.shuffle=true")
    assert after < before + 0.05
