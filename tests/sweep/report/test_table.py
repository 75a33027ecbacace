"""The table's numbers against ones computed by hand, and its three forms."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from tests.sweep.report.synthetic import ablation
from vapo.sweep.grid import GridRow
from vapo.sweep.report.estimates import MeanOfSeeds, compare, estimate
from vapo.sweep.report.render import as_csv, columns, markdown, page
from vapo.sweep.report.rows import SCORE
from vapo.sweep.report.run_records import RunRecord
from vapo.sweep.report.runs import Collection
from vapo.sweep.report.table import agreement, conclusion, make_table


def collection(
    scores: dict[str, dict[int, float]], paper: dict[str, float], full: str | None = "all"
) -> Collection:
    runs = [
        RunRecord(f"{row}{seed}", row, seed, {SCORE: {0: 0.1, 50: score}})
        for row, by_seed in scores.items()
        for seed, score in by_seed.items()
    ]
    return Collection("t", [GridRow(row, paper_score=paper.get(row)) for row in scores], runs, full)


def test_mean_and_interval_of_three_seeds() -> None:
    """Mean 50, s = 2, t(0.975, 2) = 4.302653: half width 4.302653 * 2 / sqrt(3) = 4.968275."""
    found = estimate([48.0, 50.0, 52.0])
    assert found.mean == pytest.approx(50)
    assert found.interval == pytest.approx((45.031725, 54.968275), abs=1e-5)
    assert estimate([48.0]) == MeanOfSeeds(48.0, None)


def test_paired_difference_takes_out_what_seeds_share() -> None:
    """Differences -1, -2, -3: mean -2, s = 1, half width 4.302653 / sqrt(3) = 2.484138."""
    found, how = compare({0: 10.0, 1: 40.0, 2: 70.0}, {0: 11.0, 1: 42.0, 2: 73.0})
    assert how == "paired"
    assert found.mean == pytest.approx(-2)
    assert found.interval == pytest.approx((-4.484138, 0.484138), abs=1e-5)
    assert not found.is_clear
    assert MeanOfSeeds(-2, (-4, -0.1)).is_clear


def test_seeds_that_are_not_common_are_left_out_of_the_pairs() -> None:
    found, how = compare({0: 10.0, 1: 12.0, 5: 99.0}, {0: 9.0, 1: 11.0, 6: 0.0})
    assert (how, found.mean) == ("paired", 1.0)


def test_welch_without_common_seeds() -> None:
    """Means 11 and 21, variances 2 and 8 of two each: se^2 = 1 + 4 = 5.

    Degrees: 25 / (1 + 16) = 1.470588; t(0.975, 1.470588) = 6.188115 (by bisection on the
    t-distribution's integral), half width 6.188115 * sqrt(5) = 13.837046.
    """
    found, how = compare({0: 10.0, 1: 12.0}, {2: 19.0, 3: 23.0})
    assert (how, found.mean) == ("unpaired", -10)
    assert found.interval == pytest.approx((-23.837046, 3.837046), abs=1e-5)


def test_one_seed_has_a_difference_and_no_interval() -> None:
    [row, _] = make_table(collection({"a": {0: 0.4}, "all": {0: 0.5}}, {"a": 1, "all": 2}))
    assert row.score == MeanOfSeeds(40.0, None)
    assert row.difference is not None
    assert row.difference.mean == pytest.approx(-10)
    assert row.difference.interval is None
    assert row.sign == "too few seeds", "one seed's sign says nothing of other training runs"


COLLAPSED = {0: 0.80, 1: 0.82, 2: 0.30, 3: 0.81, 4: 0.84}


def test_where_some_seeds_collapse_every_seed_is_shown_in_place_of_an_interval() -> None:
    """The t interval of 80, 82, 30, 81, 84 is [42, 100.0]: it covers in two of three cases only.

    Differences -10, -8, -60, -9, -6, all below 0: of the 32 ways to choose their signs two have a
    mean so far from 0, p 0.0625.
    """
    full = dict.fromkeys(range(5), 0.90)
    found = collection({"half": COLLAPSED, "all": full}, {"half": 1, "all": 2})
    table = make_table(found)
    [row, _] = table
    assert row.score is not None
    assert row.difference is not None
    assert row.score.interval is None
    assert row.score.seeds == pytest.approx((80, 82, 30, 81, 84))
    assert row.difference.p == pytest.approx(2 / 32)
    assert not row.difference.is_clear
    text = markdown(found, table)
    assert "| half | 5 | 71.4 (80.0, 82.0, 30.0, 81.0, 84.0) |" in text
    assert "| -18.6 (-10.0, -8.0, -60.0, -9.0, -6.0; p 0.062) |" in text
    assert "agrees, no difference shown" in text
    assert "seeds differ by more than 10 points" in text
    assert "p: sign flips" in text
    line = next(csv.DictReader(io.StringIO(as_csv(table))))
    assert line["score_seeds"] == "80.0 82.0 30.0 81.0 84.0"
    assert (line["score_low"], line["difference_p"]) == ("", "0.0625")


def test_eight_seeds_below_can_be_clear_though_some_collapsed() -> None:
    worse = {seed: 0.8 - 0.5 * (seed in (2, 5)) for seed in range(8)}
    found = collection({"half": worse, "all": dict.fromkeys(range(8), 0.9)}, {"half": 1, "all": 2})
    [row, _] = make_table(found)
    assert row.difference is not None
    assert row.difference.p == pytest.approx(2 / 256)
    assert row.is_shown


def test_seeds_of_another_row_that_collapse_are_compared_without_pairs() -> None:
    """Other seeds: all splits of the ten runs into five and five."""
    full = dict.fromkeys(range(10, 15), 0.9)
    found, how = compare({k: 100 * v for k, v in COLLAPSED.items()}, dict.fromkeys(full, 90.0))
    assert how == "unpaired"
    assert found.interval is None
    assert found.p == pytest.approx(2 / 252)


def test_with_one_seed_nothing_is_said_of_intervals() -> None:
    found = collection({"a": {0: 0.4}, "all": {0: 0.5}}, {"a": 1, "all": 2})
    [sentence, scores, *_] = conclusion(found, make_table(found))
    assert sentence == (
        "No difference has an interval, which takes two seeds, so no sign is compared."
    )
    assert (
        scores == "Scores: avg@k of the last evaluation, per cent. A single seed has no interval."
    )


def test_rows_without_an_interval_are_not_counted_among_those_with_one() -> None:
    scores = {"one": {0: 0.4}, "two": {0: 0.30, 1: 0.32}, "all": {0: 0.50, 1: 0.52}}
    found = collection(scores, {"one": 1, "two": 1, "all": 2})
    [sentence, *_] = conclusion(found, make_table(found))
    assert "in 1 of 1 rows, beyond the interval in 1 of them" in sentence
    assert sentence.endswith(" Rows with too few seeds to say: 1.")


def test_a_difference_over_some_of_the_seeds_says_so_in_its_row() -> None:
    """Means 40 and 60 and a difference of +2: over seeds 0 and 1, which both have."""
    found = collection(
        {"part": {0: 0.52, 1: 0.54, 2: 0.14}, "all": {0: 0.50, 1: 0.52, 3: 0.78}, "whole": {0: 1}},
        {},
    )
    table = make_table(found)
    text = markdown(found, table)
    assert "| +2.0 [+2.0, +2.0] (2 common seeds) |" in text
    assert "| whole | 1 | 100.0 | +50.0 (1 common seed) |" in text
    assert "2 common seeds" in page(found, table, {})
    lines = {line["row"]: line for line in csv.DictReader(io.StringIO(as_csv(table)))}
    assert (lines["part"]["common_seeds"], lines["whole"]["common_seeds"]) == ("2", "1")
    same = collection({"a": {0: 0.4, 1: 0.3}, "all": {0: 0.5, 1: 0.5}}, {})
    assert "common" not in markdown(same, make_table(same))


def test_the_score_is_the_last_evaluations() -> None:
    record = RunRecord("r", "a", 0, {SCORE: {100: 0.7, 9: 0.9, 0: 0.1}})
    assert record.score() == 0.7
    assert RunRecord("r", "a", 0).score() is None


def test_the_score_within_so_many_policy_steps() -> None:
    # 20 optimizer steps of value pretraining come first, and do not count
    steps = {20: 0.0, 60: 40.0, 100: 80.0}
    history = {SCORE: {0: 0.1, 60: 0.4, 100: 0.7}, "progress/policy_steps": steps}
    record = RunRecord("r", "a", 0, history)
    assert [record.score(n) for n in (39, 40, 79, 80)] == [0.1, 0.4, 0.4, 0.7]
    found = replace(collection({"all": {0: 0.5}}, {}), runs=[record], within=40)
    found = replace(found, rows=[GridRow("a")], full_system=None)
    [row] = make_table(found)
    assert row.score == MeanOfSeeds(40.0, None)
    assert "within 40 optimizer steps of the policy" in markdown(found, [row])


@pytest.mark.parametrize(
    ("ours", "papers", "sign"),
    [
        (-3, -49, "agrees"),
        (3, -49, "differs"),
        (3, 2, "agrees"),
        (0, -5, "no effect"),
        (0, 5, "no effect"),
        (-0.0, 5, "no effect"),
        (1.4e-14, -5, "no effect"),  # what float arithmetic leaves of 0
        (0.01, -5, "differs"),
        (0, 0, ""),
        (0, None, ""),
        (-3, None, ""),
    ],
)
def test_sign_agreement(ours: float, papers: float | None, sign: str) -> None:
    interval = (ours - 1.0, ours + 1.0)
    assert agreement(MeanOfSeeds(ours, interval, over="seeds"), papers) == sign
    assert agreement(None, papers) == ""
    without = sign if sign in ("", "no effect") else "too few seeds"
    assert agreement(MeanOfSeeds(ours), papers) == without
    assert agreement(MeanOfSeeds(ours, interval, over="prompts"), papers) == without


def test_a_difference_of_exactly_0_is_no_effect() -> None:
    """In every seed alike, on average over seeds, without a seed in common, and of one seed."""
    found = collection(
        {
            "the same": {0: 0.50, 1: 0.52},
            "up and down": {0: 0.52, 1: 0.50},
            "other seeds": {2: 0.52, 3: 0.50},
            "one seed": {0: 0.50},
            "rounded": {0: 0.1 + 0.2, 1: 0.72},  # the seeds' differences: -20 + 4e-15 and +20
            "worse": {0: 0.40, 1: 0.52},
            "all": {0: 0.50, 1: 0.52},
        },
        {
            "the same": 11, "up and down": 12, "other seeds": 13, "one seed": 14, "rounded": 15,
            "worse": 16, "all": 60,
        },
    )  # fmt: skip
    table = make_table(found)
    rows = {row.name: row for row in table}
    assert [row.sign for row in table] == ["no effect"] * 5 + ["agrees", ""]
    assert rows["the same"].difference == MeanOfSeeds(0.0, (0.0, 0.0), over="seeds")
    assert rows["one seed"].difference == MeanOfSeeds(0.0, None)
    text = markdown(found, table)
    assert "| the same | 2 | 51.0 [38.3, 63.7] | +0.0 [+0.0, +0.0] | 11 | -49 | no effect |" in text
    assert "| 14 | -46 | no effect |" in text
    assert "| 16 | -44 | agrees, no difference shown |" in text
    assert "the paper's sign in 1 of 6 rows" in text
    assert "It is exactly 0 (no effect) in 5." in text
    assert "it has the other sign beyond the interval in 0." in text
    dust = 1.4e-14
    assert not MeanOfSeeds(dust, (dust, dust)).is_clear
    assert "<td>no effect</td>" in page(found, table, {})
    lines = list(csv.DictReader(io.StringIO(as_csv(table))))
    assert (lines[0]["sign"], lines[0]["beyond_interval"]) == ("no effect", "false")
    assert (lines[3]["sign"], lines[3]["beyond_interval"]) == ("no effect", "")


def test_an_interval_that_holds_0_shows_no_difference() -> None:
    found = collection(
        {
            "agrees": {0: 0.40, 1: 0.52},
            "differs": {0: 0.52, 1: 0.52},
            "one seed": {0: 0.40},
            "clear": {0: 0.30, 1: 0.32},
            "all": {0: 0.50, 1: 0.52},
        },
        {"agrees": 11, "differs": 12, "one seed": 13, "clear": 14, "all": 60},
    )
    table = make_table(found)
    signs = [columns(found, table)["sign"](row) for row in table]
    assert signs == [
        "agrees, no difference shown",
        "differs, no difference shown",
        "too few seeds",
        "agrees, clear",
        "",
    ]
    [sentence, *_] = conclusion(found, table)
    assert "the interval holds 0 in 2 (no difference shown)" in sentence


def test_table_of_a_sweep() -> None:
    found = collection(
        {
            "worse": {0: 0.30, 1: 0.32, 2: 0.31},
            "better": {0: 0.70, 1: 0.71, 2: 0.72},
            "unpublished": {0: 0.5},
            "not run": {},
            "all": {0: 0.50, 1: 0.52, 2: 0.51},
        },
        {"worse": 11, "better": 55, "all": 60},
    )
    rows = {row.name: row for row in make_table(found)}
    worse = rows["worse"].difference
    assert worse is not None
    assert worse.mean == pytest.approx(-20)
    assert rows["worse"].paper_difference == -49
    assert [row.sign for row in rows.values()] == ["agrees", "differs", "", "", ""]
    assert rows["not run"].score is None
    assert rows["all"].difference is None
    text = markdown(found, list(rows.values()))
    assert (
        "| worse | 3 | 31.0 [28.5, 33.5] | -20.0 [-20.0, -20.0] | 11 | -49 | agrees, clear |"
        in (text)
    )
    assert "| not run | 0 |  |  |  |  |  |" in text
    assert "| **all** | **3** | **51.0 [48.5, 53.5]** |  | **60** |  |  |" in text
    assert "in 1 of 2 rows, beyond the interval in 1 of them; it has the other sign" in text
    lines = list(csv.DictReader(io.StringIO(as_csv(list(rows.values())))))
    assert float(lines[0]["difference"]) == pytest.approx(-20)
    assert (lines[0]["sign"], lines[0]["beyond_interval"]) == ("agrees", "true")
    assert (lines[2]["paper_score"], lines[3]["score"]) == ("", "")


def test_without_a_full_system_there_is_no_comparison() -> None:
    found = collection({"a": {0: 0.4}, "b|c": {0: 0.5}}, {}, full=None)
    text = markdown(found, make_table(found))
    expected = "| row | seeds | score, % |\n|---|---:|---:|\n| a | 1 | 40.0 |\n| b\\|c |"
    assert text.startswith(expected)


def test_what_is_missing_is_said_and_html_is_escaped() -> None:
    found = Collection(
        "<t>", [GridRow("a<b")], [], None, notes=["Not in the table: a<b/0 (failed)."]
    )
    table = make_table(found)
    assert "Not in the table: a<b/0 (failed)." in conclusion(found, table)
    html = page(found, table, {})
    assert "<td>a&lt;b</td>" in html
    assert "<title>&lt;t&gt;</title>" in html


def test_the_synthetic_ablation_agrees_with_the_paper() -> None:
    found = ablation()
    signs = {row.name: row.sign for row in make_table(found)}
    assert set(signs.values()) == {"agrees", ""}
    assert sum(sign == "agrees" for sign in signs.values()) == 10


def test_a_rows_name_cannot_break_the_markdown_table() -> None:
    """`tracking.run_name` may have any characters."""
    full = "all\nof | it"
    found = collection({"a | b\nc": {0: 0.4, 1: 0.3}, full: {0: 0.5, 1: 0.5}}, {}, full)
    found = replace(found, notes=["a | b\nc, seed 0: left out."])
    lines = markdown(found, make_table(found)).splitlines()
    assert lines[0] == r"| row | seeds | score, % | difference to all of \| it |"
    assert lines[2].startswith(r"| a \| b c | 2 | 35.0 ")
    assert lines[3].startswith(r"| **all of \| it** | **2** | **50.0 ")
    assert lines[4] == ""
    assert lines[-1] == "a | b c, seed 0: left out."


def test_no_difference_between_scores_on_other_held_out_prompts() -> None:
    """A run that recorded none is compared: an old one, or another program's."""
    found = collection({"all": {0: 0.5}, "same": {0: 0.6}, "old": {0: 0.7}, "other": {0: 0.9}}, {})
    heldout = {"all": "a1", "same": "a1", "other": "b2"}
    runs = [replace(run, heldout=heldout.get(run.row)) for run in found.runs]
    found = replace(found, runs=runs)
    table = make_table(found)
    gaps = {row.name: row.difference and round(row.difference.mean, 6) for row in table}
    assert gaps == {"all": None, "same": 10, "old": 20, "other": None}
    said = "No difference to all, since the held-out prompts are others: other."
    assert conclusion(found, table)[-1] == said
