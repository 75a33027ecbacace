"""The smallest valid config of each schema, and how the tests load them."""

from __future__ import annotations

from pathlib import Path

from vapo.config import FitConfig
from vapo.config.loading import load_config

ROOT = Path(__file__).parents[2]

# The state-tracking task, on which most runs of the tests are: its sizes are in their literals.
STATE_TRACKING = [ROOT / "conf/state_tracking/vapo.yaml"]
ON_STATE_TRACKING = ("--config", "conf/state_tracking/vapo.yaml")

MINIMAL = """\
actor:
  path: some/policy
critic:
  init: policy
data:
  train:
    path: prompts.jsonl
"""
PROCEDURAL = ("data.train.kind=procedural", "data.train.task=t", "data.train.num_examples=9")


def write(folder: Path, text: str, name: str = "overlay.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def fit_config(folder: Path, *overrides: str, overlay: str = "") -> FitConfig:
    files = [write(folder, MINIMAL, "minimal.yaml"), write(folder, overlay)]
    return load_config(FitConfig, files, list(overrides))
