"""Critics destroyed on purpose: what is done to the values, and what is made of the runs."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.config.fits import ROOT
from tests.judged import judged_batch
from tests.rollout_fixtures import make_rollouts
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.training import iteration
from vapo.types import EvaluatedBatch, Phase


@pytest.fixture
def destroyed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "experiments/critics"))
    return import_module("destroyed")


VALUES = [[0.5, 0.25, 0.0], [-0.5, 0.0, 0.0], [0.75, 0.5, 0.25], [1.0, 0.0, 0.0]]
MASK = [[1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 0]]


def batch_of(values: list[list[float]] = VALUES) -> EvaluatedBatch:
    """Two groups of two responses, of 3, 1, 3 and 2 tokens."""
    batch = judged_batch(
        *make_rollouts(4, vocab_size=20, max_response=3), group_size=2, max_response_tokens=3
    )
    mask = torch.tensor(MASK, dtype=torch.bool)
    made = {**vars(batch), "response_mask": mask, "loss_mask": mask, "value_mask": mask}
    return EvaluatedBatch(**made, old_values=torch.tensor(values))


def test_values_are_spoiled_as_their_names_say(destroyed: ModuleType) -> None:
    batch, generator = batch_of(), torch.Generator().manual_seed(0)

    def spoiled(kind: str) -> list[list[float]]:
        values = destroyed.SPOILERS[kind](batch.values, batch, generator)
        return [row[mask].tolist() for row, mask in zip(values, batch.response_mask, strict=True)]

    assert spoiled("as they are") == [[0.5, 0.25, 0.0], [-0.5], [0.75, 0.5, 0.25], [1.0, 0.0]]
    # the mean of the nine values is 2.75 / 9
    mean = 2 * 2.75 / 9
    assert spoiled("turned round")[0] == pytest.approx([mean - 0.5, mean - 0.25, mean])
    # those of the next prompt's response; behind its end its last value
    others = [[0.75, 0.5, 0.25], [1.0], [0.5, 0.25, 0.0], [-0.5, -0.5]]
    assert spoiled("another response's") == others
    assert spoiled("shifted by 0.5")[1:3] == [[0.0], [1.25, 1.0, 0.75]]
    assert spoiled("a constant") == [[0.0] * 3, [0.0], [0.0] * 3, [0.0] * 2]
    many = torch.zeros(1000, 10)
    noise = destroyed.SPOILERS["noise of 0.5"](many, batch, generator)
    assert float(noise.std()) == pytest.approx(0.5, abs=0.01)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.02)


def test_advantages_see_spoiled_values_in_the_policys_phase_alone(
    destroyed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The critic's targets, and so its training, stay what they were."""
    config = load_config(FitConfig, [ROOT / "conf/vapo.yaml"], [])
    sound, batch = iteration.estimate_advantages, batch_of()

    def estimated(phase: Phase) -> Any:
        return iteration.estimate_advantages(batch, phase, config, None)

    policy, pretraining = Phase.POLICY_OPTIMIZATION, Phase.VALUE_PRETRAINING
    with destroyed.spoiled_values("shifted by 0.5", 3):
        found, before = estimated(policy), estimated(pretraining)
    assert iteration.estimate_advantages is sound
    shifted = torch.where(batch.response_mask, batch.values + 0.5, batch.values)
    by_hand = estimated(policy)
    assert torch.equal(found.old_values, shifted)
    assert not torch.allclose(found.raw_advantages, by_hand.raw_advantages)
    mask = batch.response_mask
    assert torch.allclose(found.value_targets[mask], by_hand.value_targets[mask], atol=1e-6)
    assert torch.equal(before.old_values, batch.values)
    with destroyed.spoiled_values("as they are", 3):
        assert torch.equal(estimated(policy).advantages, by_hand.advantages)


def test_values_that_would_reach_the_critics_own_loss_are_refused(destroyed: ModuleType) -> None:
    case = destroyed.Case("default", 0, "turned round", "critic")
    assert destroyed.config_of(case, []).evaluation.num_prompts == 512
    for override in (
        "critic.value_clip=0.2",
        "components.decoupled_gae.lambda_critic=0.95",
    ):
        with pytest.raises(Exception, match="would reach the critic's own targets"):
            destroyed.config_of(case, [override])


def test_what_the_file_lacks_is_run_until_the_time_is_over(
    destroyed: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, now, begun = tmp_path / "results.json", [0.0], []

    def call(case: Any) -> dict[str, Any]:
        begun.append(case.key)
        now[0] += 61.0
        return {**vars(case), "after": 0.5, "fresh": 0.25, "seconds": 61.0}

    wanted = destroyed.cases("default", [7], ["trusted"])
    assert len(wanted) == 1 + 6
    destroyed.run_missing(wanted, output, 1.5, call, lambda: now[0])
    assert begun == [("default", 7, "", ""), ("default", 7, "as they are", "trusted")]
    assert "5 runs are left" in capsys.readouterr().out
    destroyed.run_missing(wanted, output, 1e6, call, lambda: now[0])
    assert begun == [case.key for case in wanted]
    assert len(json.loads(output.read_text())) == 7


def test_differences_are_within_a_seed(destroyed: ModuleType, tmp_path: Path) -> None:
    """+1 and +3 points: mean 2, t(0.975, 1) = 12.706 times an error of 1. Seed 9 has no partner."""
    table = import_module("destroyed_table")

    def row(values: str, baseline: str, seed: int, score: float) -> dict[str, Any]:
        own = {"task": "default", "values": values, "baseline": baseline, "seed": seed}
        return {**own, "after": score, "fresh": score - 0.1}

    rows = [
        row("", "", 0, 0.90),
        row("", "", 1, 0.80),
        row("turned round", "trusted", 0, 0.91),
        row("turned round", "trusted", 1, 0.83),
        row("turned round", "trusted", 9, 0.1),
        row("turned round", "critic", 0, 0.30),
    ]
    found = table.difference(rows, "default", ("turned round", "trusted"), "after")
    assert found == pytest.approx([1.0, 3.0])
    assert table.estimate(found).text("+") == "+2.0 [-10.7, +14.7]"
    output = tmp_path / "results.json"
    output.write_text(json.dumps(rows))
    text = table.write_report(output)
    assert (
        "| turned round | the critic's values | 30.0 (30.0) | -60.0 | 20.0 (20.0) | -60.0 |" in text
    )
    assert "| none | the others' mean, lambda 1 | 85.0 (90.0, 80.0) |  | 75.0" in text
    assert (tmp_path / "destroyed.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "table.md").read_text() == text
