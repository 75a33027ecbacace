"""Which groups and responses are shown."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.systems import estimated, made_up_batch, system_config
from vapo.config.values import ValuePagesConfig
from vapo.diagnostics.value_page.contents import ChosenGroup, groups_to_show
from vapo.diagnostics.value_page.row_choice import rows_to_show
from vapo.types import TrainingBatch

LENGTHS = [3, 2, 4, 5, 1, 2, 9, 1, 1, 2, 2, 2]  # four groups of three


def by_group(numbers: list[float]) -> torch.Tensor:
    return torch.tensor(numbers).repeat_interleave(3)[:, None].repeat(1, 10)


def made_up(num_groups: int = 4) -> TrainingBatch:
    config = system_config("vapo")
    return estimated(config, made_up_batch(config, num_groups=num_groups)[0])


def batch() -> tuple[TrainingBatch, torch.Tensor]:
    """Errors by group 0.1, 0.9, 0.2, 0.2; group 2 and 3 are mixed, 1 of 3 each."""
    made = replace(
        made_up(),
        response_mask=torch.arange(10) < torch.tensor(LENGTHS)[:, None],
        is_correct=torch.tensor([1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1]).bool(),
        advantages=by_group([0.1, -3.0, 2.0, 0.5]),
    )
    errors = by_group([-0.1, 0.9, -0.2, 0.2])
    errors[~made.response_mask] = 99.0
    return made, errors


def choose(num_groups: int, max_tokens: int = 1000, seed: int = 0) -> list[ChosenGroup]:
    made, errors = batch()
    return groups_to_show(
        made, errors, ValuePagesConfig(None, num_groups, 3, max_tokens), seed=seed
    )


def test_each_reason_takes_the_best_group_that_is_left() -> None:
    found = [(group.index, group.reason) for group in choose(4)]
    assert found == [
        (1, "largest value error"),  # before its advantages, the largest too, can choose it
        (2, "right and wrong answers"),  # of two equally mixed ones the first
        (3, "largest advantages"),
        (0, "longest response"),
    ]


def test_without_values_no_group_is_chosen_by_them() -> None:
    made, _ = batch()
    found = groups_to_show(made, None, ValuePagesConfig(None, 9, 3, 99), seed=0)
    assert [group.reason for group in found] == [
        "right and wrong answers",
        "largest advantages",
        "longest response",
        "at random",
    ]


def test_no_mixed_group_is_made_up() -> None:
    made, errors = batch()
    made = replace(made, is_correct=torch.zeros(12, dtype=torch.bool))
    found = groups_to_show(made, errors, ValuePagesConfig(None, 4, 3, 99), seed=0)
    assert "right and wrong answers" not in [group.reason for group in found]


def test_the_same_seed_chooses_the_same() -> None:
    made = made_up(num_groups=40)
    made = replace(made, advantages=made.old_values)

    def chosen(seed: int) -> list[ChosenGroup]:
        return groups_to_show(made, None, ValuePagesConfig(None, 8, 2, 999), seed=seed)

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)
    assert len({group.index for group in chosen(1)}) == 8


def test_right_and_wrong_ones_by_turns_in_the_batchs_order() -> None:
    verdicts = [False, False, False, True, True]
    found = rows_to_show(
        range(10, 15), is_correct=verdicts, lengths=[5] * 5, max_responses=3, max_tokens=99
    )
    assert found == {10: 5, 13: 5, 14: 5}


def test_what_does_not_fit_is_left_out_whole() -> None:
    found = rows_to_show(
        range(3), is_correct=[True] * 3, lengths=[50, 80, 30], max_responses=3, max_tokens=90
    )
    assert found == {0: 50, 2: 30}


def test_where_none_fits_the_shortest_is_cut() -> None:
    found = rows_to_show(
        range(3), is_correct=[True] * 3, lengths=[50, 80, 30], max_responses=3, max_tokens=20
    )
    assert found == {2: 20}


def test_groups_share_the_budget() -> None:
    groups = choose(4, max_tokens=20)
    assert sum(sum(group.num_tokens.values()) for group in groups) <= 20
    assert len(groups) == 4
    assert list(groups[0].num_tokens.values()) == [
        5
    ]  # of its 5, 1 and 2: the first fills the group's share
