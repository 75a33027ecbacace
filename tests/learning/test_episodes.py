"""Episodes of many turns: tugs of war are learnt, and their critic knows how a game stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.commands import output_options, summary, vapo_process
from tests.recorded_metrics import metric_values

pytestmark = [pytest.mark.learning, pytest.mark.timeout(900)]


def test_vapo_learns_to_win(tmp_path: Path) -> None:
    result = vapo_process(
        "fit",
        *("--config", "conf/tug_of_war/vapo.yaml"),
        *("training.num_iterations=4", "evaluation.every_n_iterations=4"),
        "evaluation.num_prompts=64",
        *output_options(tmp_path),
        timeout_s=850,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    run = Path(result.stdout.strip().splitlines()[-1])
    contents = summary(run)
    assert contents["score_before"] < 0.45
    assert contents["score_after"] > contents["score_before"] + 0.25
    explained = metric_values(run, "critic/explained_variance")
    assert sum(explained[-5:]) / 5 > 0.3, "the last of value pretraining, and those of the policy"
