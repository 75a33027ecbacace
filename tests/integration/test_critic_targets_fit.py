"""The options of targets, baseline and surrogate through the real job, stopped and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_algorithms import assert_goes_on, tiny_fit
from tests.recorded_metrics import metric_values
from tests.tracking.metric_docs import documented_keys
from vapo.runs.checkpoints import read_checkpoint

EVERYTHING = [
    "algorithm.baseline.kind=tether",
    "algorithm.surrogate=dis",
    "components.clip_higher.enabled=false",
    "components.length_adaptive_gae.k=0.5",
    "critic.weights=prompt_noise",
    "critic.anchors=[0.3,0.6,0.9]",
    "critic.reward=unshaped",
    "critic.truncated=train",
    "rewards.overlong.soft_punishment=true",
    "rewards.overlong.filter_truncated=true",
    "rollouts.max_response_tokens=12",  # some responses are truncated
]


@pytest.mark.kills  # test_composite_resume.py has tether among all that resumes
def test_resumed_in_the_middle_tether_goes_on_with_what_it_had_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_goes_on("vapo", tmp_path, monkeypatch, *EVERYTHING)


@pytest.mark.kills
def test_resumed_in_the_middle_a_trusted_baseline_goes_on_with_its_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("algorithm.baseline.kind=trusted", "components.group_sampling.num_prompts=4")
    assert_goes_on("vapo", tmp_path, monkeypatch, *options)


@pytest.mark.slow
def test_tether_and_the_options_of_targets_do_what_they_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tiny_fit("vapo", tmp_path, monkeypatch, *EVERYTHING)
    printed = capsys.readouterr().out
    assert "k 0.5: the advantage of a long response's first token has 50 % of the final" in printed
    expected = read_checkpoint(whole / "checkpoints/last.ckpt")
    assert expected["baseline"]["num_batches"] == 2
    assert expected["baseline"]["rho"] != 0
    weights = metric_values(whole, "baseline/critic_weight")
    assert weights[0] == 0
    assert weights[1] == pytest.approx(0.1 * metric_values(whole, "baseline/fitted_weight")[0])
    assert 0 < metric_values(whole, "rollout/truncation_rate")[0] < 1
    keys = {"actor/rejected_share", "baseline/num_fits", "advantage/first_token_reward_weight"}
    assert keys <= documented_keys()
    for key in keys:
        assert metric_values(whole, key), key
