"""What a training is put together of, by its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.systems import system_config
from vapo.rollouts.stored_rollouts import RolloutDataset
from vapo.system.progress import Progress
from vapo.training.module import VapoModule
from vapo.training.parts import TrainingParts, assemble_parts
from vapo.types import Phase

FIRST_BATCH = ("critic.init=policy", "critic.head.start=first_batch")
TRUTH = ("value_truth.every_n_iterations=1", "value_truth.num_prefixes=1")


def parts_of(*overrides: str, **options: Any) -> TrainingParts:
    module = VapoModule(system_config("vapo", *overrides), pad_id=0)
    given: dict[str, Any] = {"progress": Progress(enabled=False), "critic_dir": None, **options}
    return assemble_parts(module, lambda module: None, **given)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("overrides", "observers"),
    [
        ((), []),
        (FIRST_BATCH, ["HeadStart"]),
        (TRUTH, ["ValueTruths"]),
        ((*FIRST_BATCH, *TRUTH), ["ValueTruths", "HeadStart"]),
    ],
)
def test_the_iteration_is_given_the_observers_that_the_config_asks_for(
    overrides: tuple[str, ...], observers: list[str]
) -> None:
    parts = parts_of(*overrides)
    found = list(parts.datamodule.observers)
    assert [type(observer).__name__ for observer in found] == observers
    assert (parts.truths in found) == ("ValueTruths" in observers)


def test_value_pretraining_comes_before_the_sync_and_with_a_folder_alone(tmp_path: Path) -> None:
    stored: Any = RolloutDataset.__new__(RolloutDataset)
    for folder, names in ((None, ["WeightSync"]), (tmp_path, ["ValuePretraining", "WeightSync"])):
        parts = parts_of(critic_dir=folder, stored=stored)
        assert [type(callback).__name__ for callback in parts.callbacks] == names
    assert parts.callbacks[0].stored is stored  # type: ignore[attr-defined]
    assert parts.module.phase is Phase.POLICY_OPTIMIZATION, "until the Trainer sets it up"


def test_the_networks_to_train_and_the_safe_point_reach_the_iterations() -> None:
    points: list[str] = []
    parts = parts_of(trained=("critic",), safe_point=lambda: points.append("safe"))
    runner = parts.datamodule.make_runner(parts.module, total=3)
    assert (runner.trained, runner.total) == (("critic",), 3)
    runner.safe_point()
    assert points == ["safe"]
