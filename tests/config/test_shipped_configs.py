"""Every YAML under conf/ is parsed, checked and resolved, alone or over what it overlays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.fits import ROOT
from vapo.config import FitConfig, RewardModelConfig, SftConfig, resolve
from vapo.config.flattening import to_yaml
from vapo.config.loading import Composed, compose, from_yaml, load_config

CONF = ROOT / "conf"
DEFAULT = CONF / "vapo.yaml"
ALGORITHMS = sorted(CONF.glob("algorithm/*.yaml"))
SCALES = sorted(CONF.glob("scale/*.yaml"))
DATA = sorted(CONF.glob("data/*.yaml"))
TASKS = sorted(CONF.glob("*/vapo.yaml"))
TASKS.remove(CONF / "algorithm/vapo.yaml")
NAMES = {"vapo": FitConfig, "sft": SftConfig, "reward_model": RewardModelConfig}


def schema_of(path: Path) -> type | None:
    """The schema of a whole config, by its name: vapo*.yaml, sft*.yaml, reward_model*.yaml."""
    return next((s for name, s in NAMES.items() if path.stem.startswith(name)), None)


def test_every_file_has_a_known_place() -> None:
    places = {path.relative_to(CONF).parts[0] for path in CONF.rglob("*.yaml")}
    known = {"algorithm", "data", "scale", "sweep", *(task.parent.name for task in TASKS)}
    unknown = places - known
    assert all(schema_of(Path(name)) for name in unknown), unknown
    assert DEFAULT.is_file()
    assert not list(CONF.rglob("*.yml"))


WHOLE = [
    *CONF.glob("*.yaml"),
    *(p for t in TASKS for p in t.parent.glob("*.yaml") if p not in TASKS),
]


@pytest.mark.parametrize("path", sorted(WHOLE), ids=lambda path: str(path.relative_to(CONF)))
def test_whole_config(path: Path) -> None:
    schema = schema_of(path)
    assert schema is not None
    composed: Composed[Any] = compose(schema, [path], [])
    assert from_yaml(schema, to_yaml(composed.config), source="again") == composed.config
    if isinstance(composed.config, FitConfig):
        resolve(composed.config)


def test_default_has_all_seven_components_on() -> None:
    numbers = resolve(load_config(FitConfig, [DEFAULT], []))
    assert numbers.value_pretraining_iterations > 0
    assert numbers.lambda_critic == 1.0
    assert numbers.alpha is not None
    assert numbers.loss_reduction == "token_mean"
    assert (numbers.eps_low, numbers.eps_high) == (0.2, 0.28)
    assert numbers.mu == 0.1
    assert numbers.group_size > 1


@pytest.mark.parametrize(
    "overlay",
    [DEFAULT, *ALGORITHMS, *DATA, *SCALES, *TASKS],
    ids=lambda path: str(path.relative_to(CONF)),
)
def test_overlay_of_the_default(overlay: Path) -> None:
    resolve(load_config(FitConfig, [DEFAULT, overlay], []))


@pytest.mark.parametrize(
    "base", [DEFAULT, *DATA, *SCALES, *TASKS], ids=lambda path: str(path.relative_to(CONF))
)
def test_every_algorithm_over_every_base(base: Path) -> None:
    for algorithm in ALGORITHMS:
        resolve(load_config(FitConfig, [DEFAULT, base, algorithm], []))


@pytest.mark.parametrize("data", DATA, ids=lambda path: path.stem)
def test_data_over_every_scale(data: Path) -> None:
    for scale in SCALES:
        config = load_config(FitConfig, [DEFAULT, scale, data], [])
        assert config.rewards.verifier == "math"
        resolve(config)
