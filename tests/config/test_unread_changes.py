"""What the command line changed and nothing reads is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import ROOT
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.config.unread_changes import unread_changes

VAPO, GRPO = ROOT / "conf/vapo.yaml", ROOT / "conf/algorithm/grpo.yaml"


@pytest.mark.parametrize(
    ("files", "overrides", "said"),
    [
        ([VAPO], ["algorithm.lambda_policy=0.5"], "algorithm.lambda_policy=0.5 has no effect"),
        ([VAPO, GRPO], ["algorithm.lambda_policy=0.5"], "group_relative has no lambda"),
        ([VAPO, GRPO], ["critic.optimizer.lr=5.0"], "group_relative has no critic"),
        (
            [VAPO],
            ["components.clip_higher.enabled=false", "components.clip_higher.eps_high=0.4"],
            "eps_high=0.4 has no effect: components.clip_higher.enabled is false",
        ),
    ],
    ids=["lambda", "no lambda", "critic", "component"],
)
def test_a_typed_key_that_nothing_reads(files: list[Path], overrides: list[str], said: str) -> None:
    (line,) = unread_changes(load_config(FitConfig, files, overrides))
    assert said in line


@pytest.mark.parametrize(
    ("files", "overrides"),
    [
        ([VAPO, GRPO], []),
        ([VAPO], ["components.length_adaptive_gae.enabled=false", "algorithm.lambda_policy=0.5"]),
        ([VAPO], ["critic.optimizer.lr=1e-4", "components.clip_higher.eps_high=0.3"]),
        ([VAPO], ["components.positive_example_lm_loss.enabled=false"]),
    ],
)
def test_files_and_keys_that_are_read(files: list[Path], overrides: list[str]) -> None:
    assert list(unread_changes(load_config(FitConfig, files, overrides))) == []
