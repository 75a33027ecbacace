"""Intervals over seeds and prompts together: by hand, and how often they hold the truth."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from vapo.intervals import crossed_half_width
from vapo.sweep.grid import GridRow
from vapo.sweep.report.estimates import compare, estimate, paired_differences, score_table
from vapo.sweep.report.render import as_csv, markdown
from vapo.sweep.report.rows import SCORE
from vapo.sweep.report.run_records import AVERAGE, FRESH, RECENT, RunRecord
from vapo.sweep.report.runs import Collection
from vapo.sweep.report.table import make_table
from vapo.tracking.prompt_scores import PromptHistory, ScoredPrompts
from vapo.types import PromptScore

T1, T2 = 12.706205, 4.302653  # t(0.975) with 1 and 2 degrees of freedom


def test_half_width_of_two_seeds_and_three_prompts() -> None:
    """Means of the rows 0.5 and 0.7, of the columns 0.4, 0.5 and 0.9, of all 0.6.

    MS_S = 3 (0.1^2 + 0.1^2) / 1 = 0.06, MS_P = 2 (0.2^2 + 0.1^2 + 0.3^2) / 2 = 0.14. What is left
    is 0.1, -0.1, 0 and the same with the other sign: MS_SP = 4 * 0.01 / 2 = 0.02. So
    h^2 = (T1^2 * 0.06 + T2^2 * 0.12) / 6.
    """
    scores = np.array([[0.4, 0.3, 0.8], [0.4, 0.7, 1.0]])
    expected = math.sqrt((T1**2 * 0.06 + T2**2 * 0.12) / 6)
    assert crossed_half_width(scores) == pytest.approx(expected, rel=1e-6)


def test_where_prompts_differ_by_chance_alone_it_is_the_interval_over_seeds() -> None:
    """Columns of one mean: 0.3 and 0.7 each. MS_P is 0, and the seeds' part is left."""
    scores = np.array([[0.2, 0.4, 0.3], [0.8, 0.6, 0.7]])
    alone = estimate([30.0, 70.0 - 30.0])  # 30 and 40: no collapse
    assert alone.over == "seeds"
    by_seeds = T1 * 0.4 / math.sqrt(2) / math.sqrt(2)
    assert crossed_half_width(scores) == pytest.approx(by_seeds, rel=1e-6)


def drawn(
    rng: np.random.Generator, tables: int, seeds: int, prompts: int, *, spread: tuple[float, ...]
) -> np.ndarray:
    """Shares of eight responses; a response is right with probability 1/2, plus a part of its
    seed, one of its prompt and one of both, each even on both sides of 0. [tables, S, P]"""
    sizes = ((tables, seeds, 1), (tables, 1, prompts), (tables, seeds, prompts))
    parts = [rng.uniform(-x, x, size) for x, size in zip(spread, sizes, strict=True)]
    return rng.binomial(8, 0.5 + sum(parts)) / 8


@pytest.mark.parametrize(
    ("seeds", "prompts", "spread", "alone"),
    [
        (3, 64, (0.03, 0.35, 0.1), (0.75, 0.90)),  # prompts decide: the old interval is too narrow
        (5, 64, (0.03, 0.35, 0.1), (0.60, 0.80)),
        (5, 512, (0.03, 0.35, 0.1), (0.80, 0.91)),
        (8, 64, (0.0, 0.0, 0.1), (0.92, 0.98)),  # chance decides: both hold
        (4, 128, (0.06, 0.0, 0.1), (0.91, 0.98)),  # seeds decide
    ],
)
def test_how_often_the_interval_holds_the_truth(
    seeds: int, prompts: int, spread: tuple[float, ...], alone: tuple[float, float]
) -> None:
    """95 % or a little more, where the interval over seeds alone holds in 70 to 90 %."""
    rng = np.random.default_rng(5)
    tables = drawn(rng, 400, seeds, prompts, spread=spread)
    error = abs(tables.mean(axis=(1, 2)) - 0.5)
    together = np.array([crossed_half_width(table) for table in tables])
    intervals = [estimate(list(100 * table.mean(axis=1))).interval for table in tables]
    seeds_alone = np.array([(high - low) / 200 for low, high in filter(None, intervals)])
    assert 0.93 <= float((error <= together).mean()) <= 0.995
    assert alone[0] <= float((error <= seeds_alone).mean()) <= alone[1]
    assert bool((together >= seeds_alone - 1e-12).all())


def test_how_often_a_paired_difference_holds_the_truth() -> None:
    """Two rows on the same seeds and prompts, whose difficulty is taken out."""
    rng = np.random.default_rng(6)
    difficulty = rng.uniform(-0.3, 0.3, (400, 1, 64))
    rows = [
        rng.binomial(8, 0.5 + difficulty + rng.uniform(-0.05, 0.05, (400, 4, 1))) / 8
        for _ in range(2)
    ]
    differences = rows[0] - rows[1]
    widths = np.array([crossed_half_width(table) for table in differences])
    unpaired = np.array([[crossed_half_width(table) for table in row] for row in rows])
    assert 0.93 <= float((abs(differences.mean(axis=(1, 2))) <= widths).mean()) <= 0.99
    without_pairs = np.sqrt((unpaired**2).sum(axis=0))
    assert float(np.median(widths)) < 0.8 * float(np.median(without_pairs))


def named(values: Sequence[float]) -> dict[str, float]:
    return {f"p{place}": value for place, value in enumerate(values)}


def test_only_what_all_seeds_were_asked_is_crossed() -> None:
    a, b = named([0.1, 0.2, 0.3]), named([0.3, 0.4, 0.5])
    reordered = dict(reversed(b.items()))
    table = score_table([a, reordered])
    assert table is not None
    assert table.tolist() == [[0.1, 0.2, 0.3], [0.3, 0.4, 0.5]]
    assert score_table([a]) is None
    assert score_table([a, {}]) is None
    assert score_table([{}, {}]) is None
    assert score_table([a, {"other": 1.0, **dict(list(b.items())[1:])}]) is None
    assert paired_differences([a, a], [reordered, {"p0": 0.0}]) == [
        pytest.approx({"p0": -0.2, "p1": -0.2, "p2": -0.2}),
        {},
    ]


def test_a_comparison_of_prompts_that_are_not_all_shared_is_over_seeds_alone() -> None:
    scores, full = {0: 40.0, 1: 44.0}, {0: 30.0, 1: 36.0}
    mine, theirs = named([0.4, 0.4]), named([0.3, 0.3])
    same = compare(scores, full, ({0: mine, 1: mine}, {0: theirs, 1: theirs}))[0]
    other = compare(scores, full, ({0: mine, 1: mine}, {0: theirs, 1: {"x": 0.1}}))[0]
    assert (same.over, other.over) == ("seeds and prompts", "seeds")
    assert same.mean == other.mean == 9.0
    assert compare(scores, full)[0] == other


# ---- in a report --------------------------------------------------------------------------------


def record(
    row: str, seed: int, evaluations: Sequence[Sequence[int]], *, fresh: int | None = None
) -> RunRecord:
    """A run of four responses to each prompt; evaluated before training, and then again."""
    history = PromptHistory()
    for number, correct in enumerate(evaluations):
        scores = tuple(PromptScore(f"p{i}", right, 4) for i, right in enumerate(correct))
        history.add("evaluation", ScoredPrompts(number, 10 * number, scores))
    metrics: dict[str, Mapping[int, float]] = {
        SCORE: {10 * i: sum(one) / 4 / len(one) for i, one in enumerate(evaluations)},
        "progress/policy_steps": {10 * i: 10.0 * i for i in range(len(evaluations))},
    }
    means = history.recent()[0]
    metrics[RECENT] = {10 * (len(evaluations) - 1): sum(means.values()) / len(means)}
    if fresh is not None:
        scores = tuple(PromptScore(f"{seed} {i}", min(4, fresh + i % 2), 4) for i in range(6))
        history.add("batch", history.with_news(1, 10, scores))
        metrics[FRESH] = {20: sum(one.num_correct for one in scores) / 24}
    return RunRecord(f"{row}{seed}", row, seed, metrics, scores=history)


def collection(*records: RunRecord) -> Collection:
    rows = [GridRow(name) for name in dict.fromkeys(one.row for one in records)]
    return Collection("t", rows, records, "all")


ALL = [
    record("all", seed, [[0, 0, 0, 0], [1, 2, 3, 2], [2, 2 + seed, 4, 3]], fresh=2)
    for seed in range(2)
]
NEW = [
    record("new", seed, [[0, 0, 0, 0], [2, 3, 3, 2], [3, 3 + seed, 4, 4]], fresh=3)
    for seed in range(2)
]


def test_a_report_has_the_interval_over_seeds_and_prompts() -> None:
    """Per cent of `all`: 50, 50, 100, 75 and 50, 75, 100, 75."""
    new, full = make_table(collection(*NEW, *ALL))
    assert full.score is not None
    assert full.score.mean == pytest.approx(71.875)
    scores = np.array([[0.5, 0.5, 1, 0.75], [0.5, 0.75, 1, 0.75]])
    half = 100 * crossed_half_width(scores)
    assert full.score.interval == pytest.approx((71.875 - half, 71.875 + half))
    assert new.difference is not None
    assert new.difference.mean == pytest.approx(18.75)
    assert new.difference.over == "seeds and prompts"
    text = markdown(found := collection(*NEW, *ALL), table := make_table(found))
    assert "Intervals: 95 %, over seeds and prompts together; differences paired by seed." in text
    assert "| fresh prompts, % | difference, fresh | last policies, % |" in text
    lines = {line["row"]: line for line in csv.DictReader(io.StringIO(as_csv(table)))}
    assert lines["new"]["score_over"] == lines["new"]["difference_over"] == "seeds and prompts"
    assert float(lines["new"]["fresh_difference"]) == pytest.approx(100 * (3.5 - 2.5) / 4)
    assert float(lines["all"]["fresh_score"]) == pytest.approx(62.5)
    assert float(lines["all"]["recent_score"]) == pytest.approx((50 + 50 + 68.75 + 75) / 4)
    assert lines["all"]["average_score"] == lines["all"]["average_over"] == ""


def test_runs_that_recorded_no_prompts_keep_the_old_interval_and_the_table_says_which() -> None:
    old = [replace(one, row="old", scores=PromptHistory()) for one in NEW]
    damaged = replace(ALL[0], row="other", history={**ALL[0].history, SCORE: {0: 0.0, 20: 0.4}})
    found = collection(*old, *ALL, damaged)
    table = make_table(found)
    plain = estimate([87.5, 93.75])
    assert table[0].score == plain
    assert [row.score and row.score.over for row in table] == ["seeds", "seeds and prompts", ""]
    assert (
        "Intervals: 95 %, over seeds and prompts together (all), Student's t over seeds, for these "
        "very prompts (old); differences paired by seed. A single seed has no interval."
    ) in markdown(found, table)


def test_one_seed_has_an_interval_over_its_prompts_which_is_never_clear() -> None:
    """Per cent 75, 75, 100, 100 less 50, 50, 100, 75: 25, 25, 0, 25, mean 18.75, s 12.5.

    t(0.975, 3) = 3.182446: half width 3.182446 * 12.5 / 2.
    """
    found = collection(NEW[0], ALL[0])
    new, _ = make_table(found)
    assert new.difference is not None
    half = 3.182446 * 12.5 / 2
    expected = (18.75 - half, 18.75 + half)
    assert new.difference.interval == pytest.approx(expected, abs=1e-4)
    assert new.is_shown is None
    text = markdown(found, make_table(found))
    assert "Student's t over the prompts of a single seed" in text
    assert "A single seed says nothing of other training runs." in text
    assert f"+18.8 [{expected[0]:.1f}, +{expected[1]:.1f}] (over prompts, one seed)" in text
    assert text.count("(over prompts, one seed)") == 8, "each of two rows' scores, too"
    two_seeds = collection(*NEW, *ALL)
    assert "one seed" not in markdown(two_seeds, make_table(two_seeds))


def test_scores_within_so_many_steps_have_the_prompts_of_that_evaluation() -> None:
    found = replace(collection(*NEW, *ALL), within=15)
    _, full = make_table(found)
    assert full.score is not None
    assert full.score.mean == pytest.approx(50.0)
    assert full.score.over == "seeds and prompts"


def test_the_averaged_policy_has_a_column_where_a_run_has_one() -> None:
    scores = tuple(PromptScore(f"p{i}", 3, 4) for i in range(4))
    history = PromptHistory()
    history.add("average", ScoredPrompts(2, 20, scores))
    runs = [
        replace(one, history={**one.history, AVERAGE: {20: 0.75}}, scores=history) for one in ALL
    ]
    text = markdown(found := collection(*runs), make_table(found))
    assert "| averaged, % |" in text
    assert "75.0 [75.0, 75.0]" in text
    assert "mean of the last policies' weights" in text
