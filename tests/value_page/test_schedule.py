"""When a page is due, and when the rollouts must be kept because it may be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.systems import system_config
from vapo.callbacks.diagnostics import is_due, notes
from vapo.datamodule import RolloutDataModule
from vapo.module import VapoModule
from vapo.types import Phase

STOP_RULE = "components.value_pretraining.stop_explained_variance=0.5"


def iterations(*overrides: str, stops_after: int) -> tuple[list[int], list[int]]:
    """Iterations whose page may be due, and is, of a run that goes through both phases."""
    settings = ["components.value_pretraining.num_iterations=12", "training.num_iterations=7"]
    config = system_config("vapo", *settings, "value_pages.every_n_iterations=5", *overrides)
    module = VapoModule(config, pad_id=0)
    module.phase = Phase.VALUE_PRETRAINING
    datamodule = SimpleNamespace(
        config=config, module=module, hyperparameters=module.hyperparameters
    )
    may, is_ = [], []
    for iteration in range(1, stops_after + 7 + 1):
        if RolloutDataModule.value_page_may_be_due(datamodule):  # type: ignore[arg-type]
            may.append(iteration)
        module.trained_phase = module.phase
        if iteration == stops_after:
            module.phase = Phase.POLICY_OPTIMIZATION
        if is_due(module, config.value_pages.every_n_iterations or 1):
            is_.append(iteration)
        module.policy_iterations += module.trained_phase is Phase.POLICY_OPTIMIZATION
        module.iteration += 1
    return may, is_


def test_first_and_last_of_each_phase_and_every_nth() -> None:
    due = [1, 5, 10, 12, 13, 17, 19]
    assert iterations(stops_after=12) == (due, due)


def test_a_stop_rule_may_end_pretraining_at_any_iteration() -> None:
    may, due = iterations(STOP_RULE, stops_after=3)
    assert due == [1, 3, 4, 8, 10]
    assert may == [1, 2, 3, 4, 8, 10]


def test_null_keeps_nothing() -> None:
    may, _ = iterations("value_pages.every_n_iterations=null", stops_after=12)
    assert may == []


@pytest.mark.parametrize(
    ("system", "phase", "said"),
    [
        ("grpo", Phase.POLICY_OPTIMIZATION, ["No critic (algorithm.advantage_estimator: group_"]),
        ("vapo", Phase.VALUE_PRETRAINING, ["Value pretraining: the policy is fixed"]),
        ("vapo", Phase.POLICY_OPTIMIZATION, ["Advantages are whitened"]),
    ],
)
def test_the_page_says_what_it_lacks(system: str, phase: Phase, said: list[str]) -> None:
    found = list(notes(system_config(system), phase))
    assert [note.startswith(start) for note, start in zip(found, said, strict=True)] == [True]
