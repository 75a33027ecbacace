"""`vapo fit` of models with sliding windows: engine and trainer agree in each iteration."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.config.fits import STATE_TRACKING
from tests.integration.commands import SHORTEST, output_options
from tests.networks.windowed_models import windowed_model
from tests.recorded_metrics import metric_values
from tests.tiny_model import save_tiny_folder
from vapo.commands import fit
from vapo.config import FitConfig
from vapo.config.loading import load_config

pytestmark = pytest.mark.slow


def test_three_iterations_with_a_probe(tmp_path: Path) -> None:
    policy = save_tiny_folder(tmp_path / "policy", windowed_model("gemma3"))
    values = [
        *(f"actor.path={policy}", "critic.init=policy", "critic.kind=probe"),
        *("training.packing=auto", "training.num_iterations=3"),
        *output_options(tmp_path),
    ]
    run_dir = fit.run(load_config(FitConfig, STATE_TRACKING, [*SHORTEST, *values]))
    gaps = metric_values(run_dir, "rollout/logprob_gap_max")
    assert len(gaps) == 3
    assert all(math.isfinite(gap) and gap < 1e-4 for gap in gaps)
