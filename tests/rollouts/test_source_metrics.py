"""Metrics of each source, by hand, in training and in evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.evaluation.test_evaluation import EqualityScorer, ScriptedPlayer
from tests.judged import judged_batch
from vapo.config.schema import EvaluationConfig
from vapo.environments.contract import Verdict
from vapo.evaluation import evaluate
from vapo.prompts.training_set import StagePrompts, TrainingSet, TrainingSource
from vapo.rollouts.batch import source_metrics
from vapo.system.progress import Progress
from vapo.types import FinishReason, Prompt, Rollout, RolloutBatch


def batch(*rows: tuple[str, bool, int]) -> RolloutBatch:
    """(source, correct, number of tokens) of each response, two to a prompt."""
    rollouts = [
        Rollout(
            Prompt(f"p{i // 2}", "p", (2,), "1", source=source),
            (3,) * length,
            "x",
            (0.0,) * length,
            FinishReason.STOP,
        )
        for i, (source, _, length) in enumerate(rows)
    ]
    verdicts = [Verdict(correct, 1.0 if correct else -1.0) for _, correct, _ in rows]
    return judged_batch(rollouts, verdicts, group_size=2, max_response_tokens=9)


def training(*names: str, num_stages: int = 1) -> TrainingSet:
    stages = tuple(StagePrompts([Prompt("p", "p", (2,), "1")], 5 * i) for i in range(num_stages))
    return TrainingSet(tuple(TrainingSource(stages, name) for name in names))


def test_each_source_by_hand() -> None:
    rows = [("a", True, 2), ("a", False, 4), ("b", True, 1), ("b", True, 3), ("a", False, 6)]
    rollouts = batch(*rows, ("a", False, 8))
    assert source_metrics(rollouts, training("a", "b", "c"), iteration=0) == {
        "source_a/num_prompts": 2.0,
        "source_a/accuracy": 0.25,
        "source_a/reward_mean": -0.5,
        "source_a/response_length_mean": 5.0,
        "source_b/num_prompts": 1.0,
        "source_b/accuracy": 1.0,
        "source_b/reward_mean": 1.0,
        "source_b/response_length_mean": 2.0,
        "source_c/num_prompts": 0.0,
    }


@pytest.mark.parametrize(("iteration", "stage"), [(0, 0.0), (4, 0.0), (5, 1.0), (99, 2.0)])
def test_the_stage_of_a_curriculum(iteration: int, stage: float) -> None:
    rollouts = batch(("", True, 1), ("", True, 1))
    assert source_metrics(rollouts, training(""), iteration=iteration) == {}
    staged = source_metrics(rollouts, training("", num_stages=3), iteration=iteration)
    assert staged == {"rollout/curriculum_stage": stage}
    named = batch(("a", True, 1), ("a", True, 1))
    metrics = source_metrics(named, training("a", "b", num_stages=3), iteration=iteration)
    assert metrics["source_a/curriculum_stage"] == stage


def test_evaluation_of_each_source() -> None:
    prompts = [
        Prompt("1", "7 7", (2,), "7", source="math"),
        Prompt("2", "1 cut", (2,), "1", source="sums"),
        Prompt("3", "7 8", (2,), "7", source="math"),
    ]

    def metrics(prompts: list[Prompt]) -> dict[str, float]:
        result: Any = evaluate(
            prompts,
            player=ScriptedPlayer(EqualityScorer()),
            config=EvaluationConfig(k=2),
            max_response_tokens=9,
            progress=Progress(enabled=False),
        )
        return dict(result.metrics)

    found = metrics(prompts)
    assert found["eval/avg_at_k"] == pytest.approx(4 / 6)
    assert found["eval_math/avg_at_k"] == pytest.approx(0.75)
    assert found["eval_sums/avg_at_k"] == pytest.approx(0.5)
    assert (found["eval_math/num_prompts"], found["eval_sums/num_prompts"]) == (2, 1)
    assert (found["eval_math/truncation_rate"], found["eval_sums/truncation_rate"]) == (0, 0.5)
    assert found["eval_math/pass_at_k"] == 1.0
    unnamed = metrics([replace(prompt, source="") for prompt in prompts])
    assert not any(key.startswith("eval_") for key in unnamed)
    assert unnamed == {key: v for key, v in found.items() if key.startswith("eval/")}
