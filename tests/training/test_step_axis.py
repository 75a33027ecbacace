"""Where the x axis of charts begins: at the first minibatch of the policy, in old runs, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import lightning as L
import pytest

from tests.systems import system_config
from vapo.tracking.logger import RunLogger
from vapo.training.callbacks import step_axis
from vapo.training.callbacks.step_axis import StepAxis
from vapo.training.module import VapoModule
from vapo.types import Phase

PRETRAINING, POLICY = Phase.VALUE_PRETRAINING, Phase.POLICY_OPTIMIZATION


def logger(**recorded: Any) -> Any:
    nothing = {"recorded_steps": {}, "first_recorded_step": 0, "policy_begins_at": 0}
    return MagicMock(spec=RunLogger, **nothing | recorded)


def module(system: str = "vapo", *overrides: str) -> VapoModule:
    """A module of two minibatches an iteration, with five iterations of value pretraining."""
    sizes = [
        "components.group_sampling.num_prompts=2",
        "components.group_sampling.group_size=4",
        "training.minibatch_size=4",
        "components.value_pretraining.num_iterations=5",
    ]
    return VapoModule(system_config(system, *sizes, *overrides), pad_id=0)


def begun(axis: StepAxis, of_module: VapoModule) -> int:
    """Set a run up, and return the trainer's step at which its policy begins."""
    axis.setup(MagicMock(spec=L.Trainer), of_module, "fit")
    return axis.logger.policy_begins_at


def test_the_policy_begins_after_the_planned_minibatches_of_value_pretraining() -> None:
    assert begun(StepAxis(logger()), module()) == 10
    assert begun(StepAxis(logger()), module("vapo", "critic.epochs=3")) == 30
    off = "components.value_pretraining.enabled=false"
    assert begun(StepAxis(logger()), module("vapo", off)) == 0
    assert begun(StepAxis(logger()), module("grpo")) == 0


@pytest.mark.parametrize(
    ("ended_at", "begins_at", "first_policy_step"),
    [
        (10, 10, 1),  # as planned
        (4, 4, 1),  # stopped early: steps -9 to -6, and the policy from 1
        (14, 10, 5),  # longer than planned, as in a run that was resumed with more iterations
    ],
)
def test_the_axis_never_goes_back(
    monkeypatch: pytest.MonkeyPatch, ended_at: int, begins_at: int, first_policy_step: int
) -> None:
    axis, trained = StepAxis(logger()), module()
    begun(axis, trained)
    iteration = SimpleNamespace(phase=PRETRAINING)
    monkeypatch.setattr(step_axis, "iteration_of", lambda trainer: iteration)
    trainer = MagicMock(spec=L.Trainer, global_step=ended_at)
    trained.phase = PRETRAINING
    axis.on_train_epoch_end(trainer, trained)
    assert axis.logger.policy_begins_at == 10, "value pretraining goes on"
    trained.phase = POLICY
    axis.on_train_epoch_end(trainer, trained)
    assert axis.logger.policy_begins_at == begins_at
    assert ended_at + 1 - begins_at == first_policy_step
    iteration.phase = POLICY
    trainer.global_step = 99
    axis.on_train_epoch_end(trainer, trained)
    assert axis.logger.policy_begins_at == begins_at, "the policy's iterations change nothing"


def test_a_resumed_run_keeps_its_axis() -> None:
    first, resumed = StepAxis(logger(policy_begins_at=6)), StepAxis(logger())
    begun(resumed, module())
    resumed.on_load_checkpoint(MagicMock(spec=L.Trainer), module(), {})
    resumed.load_state_dict(first.state_dict())
    assert resumed.logger.policy_begins_at == 6


def test_a_run_of_an_earlier_version_counts_from_its_first_minibatch_to_its_end() -> None:
    """Its checkpoint has no state of this callback; without a checkpoint its journal tells."""
    axis = StepAxis(logger())
    begun(axis, module())
    axis.on_load_checkpoint(MagicMock(spec=L.Trainer), module(), {"callbacks": {}})
    assert axis.logger.policy_begins_at == 0
    old = logger(recorded_steps={"eval/avg_at_k": 0, "critic/value_loss": 2})
    assert begun(StepAxis(old), module()) == 0
    new = logger(
        recorded_steps={"eval/avg_at_k": 0, "critic/value_loss": -8}, first_recorded_step=-9
    )
    assert begun(StepAxis(new), module()) == 10
    scored = logger(recorded_steps={"eval/avg_at_k": 0})
    assert begun(StepAxis(scored), module()) == 10, "killed after its first evaluation"
