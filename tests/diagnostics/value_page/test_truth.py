"""A page beside the truth: its numbers are the measured ones, and a page without it has none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.diagnostics.value_page.made_up_pages import (
    contents_of,
    made_up_truth,
    rendered,
    training_batch,
)
from tests.diagnostics.value_page.reading import unpacked
from tests.diagnostics.value_truth.made_up_figures import figures, without_critic
from tests.systems import system_config
from vapo.config.values import ValuePagesConfig
from vapo.diagnostics.value_page.contents import groups_to_show
from vapo.diagnostics.value_page.row_choice import rows_to_show
from vapo.diagnostics.value_page.truth import measured_prefixes, truth_calibration
from vapo.diagnostics.value_truth.measure import ValueTruth
from vapo.diagnostics.value_truth.points import TruthPoint
from vapo.functional.columns import select_rows
from vapo.rollouts.bad_rows import CheckedBatch
from vapo.training.callbacks.diagnostics import page_of
from vapo.training.iteration import Iteration
from vapo.types import IterationStart, Phase, TrainingBatch


def point(row: int, num_tokens: int, *returns: float, **other: Any) -> TruthPoint:
    return TruthPoint(row, num_tokens, returns, f"made-up:{row // 3}", 10, **other)


def responses_of(data: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {r["row"]: r for group in data["groups"] for r in group["responses"]}


def ten_tokens() -> TrainingBatch:
    """Row 11 has ten tokens, with values 0, 0.1, ... 0.9."""
    batch = training_batch(system_config("vapo"))
    assert batch.old_values is not None
    values = batch.old_values.clone()
    values[11] = torch.arange(10) / 10
    return replace(batch, old_values=values)


def columns(*points: TruthPoint) -> dict[str, list[float | None]]:
    """Of row 11, None where there is no number."""
    batch = ten_tokens()
    truth = ValueTruth(points, figures(), (-1.0, 1.0))
    found = contents_of(batch, system_config("vapo"), truth).columns
    return {
        name: [round(x, 6) if x == x else None for x in found[name][11].tolist()]
        for name in ("truth", "truth_error")
    }


def test_tokens_have_the_truth_of_the_last_measured_prefix() -> None:
    found = columns(point(11, 6, -1.0, -1.0), point(11, 2, 1.0, -1.0), point(11, 4, 1.0, 1.0))
    assert found["truth"] == [None, None, 0.0, 0.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]
    errors = [None, None, 0.2, 0.3, -0.6, -0.5, 1.6, 1.7, 1.8, 1.9]
    assert found["truth_error"] == pytest.approx(errors)


def test_a_prefix_of_its_own_says_nothing_of_later_tokens() -> None:
    found = columns(point(11, 4, 1.0, 1.0, is_of_steps=False))
    assert found["truth"] == [None] * 4 + [1.0] + [None] * 5
    assert found["truth_error"] == pytest.approx([None] * 4 + [-0.6] + [None] * 5)


def test_padding_has_no_truth() -> None:
    batch = training_batch(system_config("vapo"))
    truth = made_up_truth(batch, range(12))
    found = contents_of(batch, system_config("vapo"), truth).columns["truth"]
    assert torch.equal(found.isfinite(), batch.response_mask)


def test_the_pages_numbers_are_the_measured_ones() -> None:
    config = system_config("vapo")
    batch = ten_tokens()
    points = [point(11, 0, 1.0, 1.0, 1.0, -1.0, value=0.0), point(11, 5, *[-1.0] * 4, value=0.5)]
    _, data = rendered(batch, config, ValueTruth(points, figures(), (-1.0, 1.0)))
    measured = responses_of(data)[11]["truth"]
    assert measured["num_tokens"] == [0, 5]
    assert measured["mean"] == [0.5, -1.0]
    assert measured["value"] == [0.0, 0.5]
    assert measured["num_continuations"] == [4, 4]
    # Wilson's for 3 of 4 and 0 of 4: 0.301 to 0.954, 0 to 0.490
    assert measured["low"] == pytest.approx([2 * 0.30064 - 1, -1.0], abs=1e-4)
    assert measured["high"] == pytest.approx([2 * 0.95441 - 1, 2 * 0.48989 - 1], abs=1e-4)
    assert [row for row, r in responses_of(data).items() if r["truth"] is not None] == [11]
    name = next(m for m in data["measures"] if m["name"] == "truth_error")
    assert name["scale"] == "diverging"
    shown = unpacked(responses_of(data)[11]["columns"]["truth_error"], 10)
    assert shown.tolist() == pytest.approx([-0.5, -0.4, -0.3, -0.2, -0.1, 1.5, 1.6, 1.7, 1.8, 1.9])


def test_rows_without_truth_are_packed_as_nothing() -> None:
    config = system_config("vapo")
    batch = training_batch(config)
    page, data = rendered(batch, config, made_up_truth(batch, [11]))
    for row, response in responses_of(data).items():
        assert (response["columns"]["truth_error"] is None) == (row != 11)
    assert "NaN" not in page.partition('id="data">')[2].partition("</script")[0]


def test_prefixes_beyond_the_tokens_that_are_shown_are_left_out() -> None:
    config = system_config("vapo", "value_pages.max_tokens=5", "value_pages.num_groups=1")
    batch = ten_tokens()
    batch = replace(batch, is_correct=torch.arange(12) == 11)
    points = [point(11, n, 1.0, 1.0) for n in (0, 4, 5, 9)]
    contents = contents_of(batch, config, ValueTruth(points, figures(), None))
    contents = replace(contents, groups=[replace(contents.groups[0], index=3, num_tokens={11: 5})])
    assert contents.truth is not None
    assert measured_prefixes(contents.truth, {11: torch.arange(5)})[11]["num_tokens"] == [0, 4]


def test_the_page_of_an_iteration_that_lost_a_row_has_the_points_of_their_responses() -> None:
    """Row 1 had a bad number, so the page lacks its group, rows 0 to 2: 4 is 1, and 11 is 8."""
    config = system_config("vapo")
    whole = training_batch(config)
    rows = [0, *range(2, 12)]
    batch = select_rows(whole, rows)
    truth = ValueTruth([point(row, 0, 1.0, -1.0) for row in (0, 4, 11)], figures())
    checked = CheckedBatch(batch, 9, rows, num_left_out=1, reason="old_values not finite")
    start = IterationStart(1, Phase.POLICY_OPTIMIZATION)
    page = page_of(Iteration(start, [], {}, batch, checked), config, truth)
    assert page is not None
    assert page.truth is not None
    assert [one.row for one in page.truth.points] == [1, 8]
    for one, row in zip(page.truth.points, (4, 11), strict=True):
        assert page.batch.rollouts[one.row] == whole.rollouts[row]


def test_pages_without_truth_say_nothing_of_it() -> None:
    config = system_config("vapo")
    batch = training_batch(config)
    _, plain = rendered(batch, config)
    _, empty = rendered(batch, config, ValueTruth([], figures()))
    assert plain == empty
    assert plain["truth"] is None
    assert "truth_error" not in {m["name"] for m in plain["measures"]}
    for response in responses_of(plain).values():
        assert response["truth"] is None
        assert not {"truth", "truth_error"} & response["columns"].keys()


def test_without_a_critic_the_truth_is_shown_alone() -> None:
    config = system_config("grpo")
    batch = training_batch(config)
    truth = replace(made_up_truth(batch, [9, 11]), figures=without_critic())
    _, data = rendered(batch, config, truth)
    assert data["truth"]["calibration"] == {}
    assert "There is no critic" in data["truth"]["verdict"][0]["text"]
    response = responses_of(data)[11]
    assert set(response["truth"]["value"]) == {None}
    assert "truth_error" not in response["columns"]


# ---- calibration -------------------------------------------------------------------------------


@pytest.mark.parametrize(("lowest", "highest"), [(-9.0, 9.0), (-0.25, 1.25)])
def test_calibration_by_hand(lowest: float, highest: float) -> None:
    """Four prompts at V = 0 with truths 0, 0, 1, 1: mean 0.5, standard error
    sqrt(4 / 3 * 4 * 0.25) / 4 = 0.288675; at V = 1 two prompts, no interval. A mean return is
    nowhere below the lowest return or above the highest, so its interval is not, either."""
    points = [
        TruthPoint(i, 0, (float(i > 1),) * 2, f"p{i}", 10, value=0.0, is_of_steps=False)
        for i in range(4)
    ]
    points += [TruthPoint(i, 5, (1.0, 0.0), f"p{i}", 10, value=1.0) for i in range(2)]
    points.append(TruthPoint(9, 5, (lowest, highest), "p9", 10, value=None))
    table = truth_calibration(ValueTruth(points, figures()))
    assert table["value_mean"] == [0.0, 1.0]
    assert table["truth_mean"] == [0.5, 0.5]
    assert table["num_prefixes"] == [4, 2]
    assert table["num_prompts"] == [4, 2]
    half = 3.182446 * math.sqrt(4 / 3) / 4  # Student's t with 3 degrees of freedom
    assert table["truth_ci_low"] == [pytest.approx(max(0.5 - half, lowest)), None]
    assert table["truth_ci_high"] == [pytest.approx(min(0.5 + half, highest)), None]


def test_prefixes_of_one_prompt_are_one_draw() -> None:
    """Four prompts with ten equal prefixes each say no more than with one each."""
    one = [TruthPoint(i, 0, (float(i > 1),) * 2, f"p{i}", 10, value=0.3) for i in range(4)]
    ten = [replace(p, num_tokens=n) for p in one for n in range(10)]
    tables = [truth_calibration(ValueTruth(points, figures())) for points in (one, ten)]
    assert tables[0]["truth_ci_low"] == pytest.approx(tables[1]["truth_ci_low"])
    assert tables[1]["num_prefixes"] == [40]


# ---- which groups ------------------------------------------------------------------------------


def chosen(measured: list[int], num_groups: int) -> list[int]:
    batch = training_batch(system_config("vapo"))
    assert batch.old_values is not None
    found = groups_to_show(
        batch,
        batch.old_values,
        ValuePagesConfig(None, num_groups, 3, 1000),
        seed=0,
        measured=measured,
    )
    return [group.index for group in found]


@pytest.mark.parametrize("group", range(4))
def test_measured_groups_come_first(group: int) -> None:
    assert chosen([3 * group + 1], 1) == [group]
    found = chosen([3 * group + 1], 4)
    assert found[0] == group
    assert sorted(found) == [0, 1, 2, 3]
    both = chosen([3 * group, 3 * ((group + 1) % 4)], 2)
    assert sorted(both) == sorted([group, (group + 1) % 4])


def test_responses_measured_at_their_steps_are_shown_rather_than_single_prefixes() -> None:
    at_steps = TruthPoint(3, 0, (1.0, -1.0), "a", 10, value=0.0)
    alone = TruthPoint(7, 4, (1.0, -1.0), "b", 10, value=0.0, is_of_steps=False)
    assert ValueTruth([at_steps, alone], figures()).rows == {3}
    assert ValueTruth([alone], figures()).rows == {7}


def test_measured_responses_come_first() -> None:
    choice: dict[str, Any] = {"is_correct": [True, False] * 2, "lengths": [5] * 4, "max_tokens": 99}
    assert rows_to_show([4, 5, 6, 7], **choice, max_responses=2) == {4: 5, 5: 5}
    assert rows_to_show([4, 5, 6, 7], **choice, max_responses=2, measured=[7]) == {4: 5, 7: 5}
    assert rows_to_show([4, 5, 6, 7], **choice, max_responses=1, measured=[6, 7]) == {6: 5}
