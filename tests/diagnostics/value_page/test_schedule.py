"""When a page is due, and its notes on what it lacks."""

from __future__ import annotations

import pytest

from tests.systems import system_config
from vapo.diagnostics.value_page.contents import notes
from vapo.training.iteration import is_due
from vapo.types import IterationStart, Phase

N = 5


def due_iterations(*, stops_after: int) -> list[int]:
    """Iterations whose page is due, of a run that goes through both phases."""
    config = system_config("vapo", "training.num_iterations=7")
    found = []
    for number in range(1, stops_after + 7 + 1):
        is_policy = number > stops_after
        phase = Phase.POLICY_OPTIMIZATION if is_policy else Phase.VALUE_PRETRAINING
        start = IterationStart(number, phase, max(0, number - stops_after - 1))
        if is_due(config, start, N, ends_phase=number == stops_after):
            found.append(number)
        if is_policy:
            knew_before = is_due(config, start, N, ends_phase=False)
            assert knew_before == (number in found), "entropies are kept before the update"
    return found


def test_first_and_last_of_each_phase_and_every_nth() -> None:
    assert due_iterations(stops_after=12) == [1, 5, 10, 12, 13, 17, 19]


def test_a_stop_rule_may_end_pretraining_at_any_iteration() -> None:
    assert due_iterations(stops_after=3) == [1, 3, 4, 8, 10]


def test_null_writes_no_page() -> None:
    config = system_config("vapo", "value_pages.every_n_iterations=null")
    for phase in Phase:
        every_n = config.value_pages.every_n_iterations
        assert not is_due(config, IterationStart(1, phase), every_n, ends_phase=False)


@pytest.mark.parametrize(
    ("system", "phase", "said"),
    [
        ("grpo", Phase.POLICY_OPTIMIZATION, ["No critic (algorithm.advantage_estimator: group_"]),
        ("vapo", Phase.VALUE_PRETRAINING, ["Value pretraining: the policy is fixed"]),
        ("vapo", Phase.POLICY_OPTIMIZATION, ["The tokens' advantages are whitened"]),
    ],
)
def test_the_page_says_what_it_lacks(system: str, phase: Phase, said: list[str]) -> None:
    found = list(notes(system_config(system), phase))
    assert [note.startswith(start) for note, start in zip(found, said, strict=True)] == [True]
