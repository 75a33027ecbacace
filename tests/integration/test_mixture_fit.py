"""A mixture with a verifier and a curriculum of its own, through the real command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.integration.commands import FEW_PROMPTS, SMALL, final_weights, fit
from tests.recorded_metrics import metric_points
from tests.tracking.metric_docs import documented_keys

SMALLER = [
    *(item for item in SMALL if item not in FEW_PROMPTS),
    "evaluation.k=1",
    "rollouts.max_response_tokens=16",
]
MIXTURE = """\
data:
  train:
    kind: mixture
    sources:
      swaps:
        weight: 3
        kind: procedural
        task: state_tracking
        num_examples: 64
        curriculum:
          - {from_iteration: 0, options: {min_steps: 2, max_steps: 3}}
          - {from_iteration: 3, options: {min_steps: 5, max_steps: 8}}
      first_digit:
        weight: 1
        kind: procedural
        task: state_tracking
        num_examples: 32
        seed: 7
        verifier: regex
        pattern: "^[a-z](\\\\d)"
  heldout:
    kind: mixture
    sources:
      easy: {kind: procedural, task: state_tracking, num_examples: 8, seed: 11}
      hard: {kind: procedural, task: state_tracking, num_examples: 8, seed: 12}
"""


def mixture_fit(folder: Path, *more: str) -> Path:
    (folder / "mixture.yaml").write_text(MIXTURE)
    return fit(folder, "--config", str(folder / "mixture.yaml"), *more, small=SMALLER)


@pytest.mark.kills  # test_composite_resume.py has a mixture among all that resumes
def test_a_mixture_resumes_exactly(tmp_path_factory: pytest.TempPathFactory) -> None:
    whole, parts = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("parts")
    run = mixture_fit(whole)
    mixture_fit(parts, "training.num_iterations=1")
    resumed = mixture_fit(parts, "--ckpt_path", "last")

    weights = final_weights(run, "actor")
    for name, tensor in final_weights(resumed, "actor").items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.slow
def test_a_mixture_is_logged_by_source(tmp_path: Path) -> None:
    points = metric_points(mixture_fit(tmp_path))
    logged = set(points)
    general = {re.sub(r"^(source|eval)_[a-z_]+/", r"\1_NAME/", key) for key in logged}
    assert general - documented_keys() == set()

    def values(key: str) -> list[float]:
        return [value for _, value in points[key]]

    assert values("source_swaps/curriculum_stage") == [0, 0, 0, 1, 1]
    assert values("source_swaps/num_prompts") == [6] * 5
    assert values("source_first_digit/num_prompts") == [2] * 5
    assert len(values("eval_easy/avg_at_k")) == len(values("eval_hard/avg_at_k")) == 3
