"""Each way to be wrong is named, by intervals, and the documentation has a row for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.diagnostics.value_truth.made_up_figures import (
    figures,
    near,
    wide,
    wide_figures,
    without_critic,
)
from vapo.diagnostics.value_truth import verdict as verdict_module
from vapo.diagnostics.value_truth.figures import TruthFigures
from vapo.diagnostics.value_truth.verdict import TRUTH_ROWS, verdict
from vapo.intervals import UNKNOWN, Figure

PAGE = Path(__file__).parents[3] / "docs/value_page.md"

BLIND: dict[str, Any] = {
    "flattening": Figure(0.12, 0.08, 0.17),
    "explained_within": near(0.01),
    "rank_agreement": near(0.55),
    "mistake_recall": near(0.2),
    "mistake_precision": near(0.2),
}
NOISE: dict[str, Any] = BLIND | {"flattening": near(0.9), "explained_within": near(-0.8)}


def anchors(of: TruthFigures) -> list[str]:
    return [remark.anchor for remark in verdict(of)]


def headline(**differing: Any) -> tuple[str, str]:
    first = verdict(figures(**differing))[0]
    return first.anchor, first.text


def test_an_exact_critic_follows_the_truth() -> None:
    assert anchors(figures()) == [
        "truth-follows",
        "truth-centred",
        "truth-baseline-better",
        "truth-mistakes-named",
    ]
    _anchor, text = headline()
    assert text == (
        "The critic tells prompts apart (explained between 0.95 [0.91, 0.99]) and follows the "
        "truth within a response (flattening 0.98 [0.94, 1.02], explained within 0.93 "
        "[0.89, 0.97])."
    )


def test_a_shifted_critic_follows_and_is_too_high_or_too_low() -> None:
    """By more than a fifth of the truth's standard deviation, 0.15 here."""
    for value, side in ((0.3, "too high on average, by 0.30"), (-0.3, "too low on average, by")):
        found = verdict(figures(bias=near(value)))
        assert found[0].anchor == "truth-follows"
        assert found[1].anchor == "truth-shifted"
        assert side in found[1].text
    assert "truth-centred" in anchors(figures(bias=near(0.1)))
    assert "truth-too-few" in anchors(figures(bias=near(0.15)))


def test_the_shift_is_measured_in_the_truths_own_spread() -> None:
    bias = {"bias": near(0.3)}
    assert "truth-shifted" in anchors(figures(**bias, variance=near(0.6)))
    assert "truth-centred" in anchors(figures(**bias, variance=near(9.0)))
    assert "truth-shifted" in anchors(figures(**bias, variance=UNKNOWN))


def test_a_critic_that_knows_the_prompt_only() -> None:
    anchor, text = headline(**BLIND)
    assert anchor == "truth-prompt-only"
    assert text.startswith("The critic tells prompts apart (explained between 0.95 [0.91, 0.99])")
    assert "does not see mistakes within a response" in text
    assert "flattening 0.12 [0.08, 0.17]" in text
    assert "truth-mistakes-missed" in anchors(figures(**BLIND))


def test_a_flat_critic_that_is_right_on_average() -> None:
    found = anchors(figures(**BLIND, explained_between=near(0.3)))
    assert found[:2] == ["truth-flat", "truth-centred"]
    assert "tells prompts apart in part" in headline(**BLIND, explained_between=near(0.3))[1]
    assert headline(**BLIND, explained_between=UNKNOWN)[1].startswith("The critic does not see")


def test_a_flat_critic_is_flat_however_well_it_moves() -> None:
    """A tenth of the truth's moves explains 1 - 0.9^2 = 0.19 of its variance."""
    found = BLIND | {
        "flattening": near(0.1),
        "explained_within": near(0.19),
        "rank_agreement": near(1),
    }
    assert headline(**found)[0] == "truth-prompt-only"


def test_a_critic_that_knows_nothing() -> None:
    for ways in (BLIND, NOISE):
        anchor, text = headline(**ways, explained_between=near(-0.1))
        assert anchor == "truth-nothing"
        assert text.startswith("The critic knows nothing: it does not tell prompts apart")


def test_a_critic_that_is_too_extreme() -> None:
    """Twice the truth explains 1 - 1 = 0 of its variance, as a constant does; it is told by the
    order of the steps."""
    twice = {"flattening": near(2.0), "explained_within": near(0.0)}
    anchor, text = headline(**twice)
    assert anchor == "truth-extreme"
    assert "sees what happens within a response but is too extreme" in text
    assert "2.0 times as much as the truth" in text
    half_more = {"flattening": near(1.5), "explained_within": near(0.75)}
    assert headline(**half_more, rank_agreement=UNKNOWN)[0] == "truth-extreme"
    unsure = verdict(figures(**twice, rank_agreement=Figure(0.6, 0.4, 0.8)))
    assert unsure[0].anchor == "truth-extreme"
    assert "sees" not in unsure[0].text
    assert "whether its values move with the truth" in unsure[-1].text


def test_noise_within_a_response() -> None:
    anchor, text = headline(**NOISE)
    assert anchor == "truth-noisy"
    assert "moves within a response, but not with the truth" in text
    wild = NOISE | {"flattening": near(2.0), "explained_within": near(-4.0)}
    assert headline(**wild)[0] == "truth-noisy"


def test_a_critic_that_follows_in_part() -> None:
    half = {"flattening": near(0.5), "explained_within": near(0.75)}
    anchor, text = headline(**half)
    assert anchor == "truth-in-part"
    assert "moves less than it" in text
    noisy = {"flattening": near(1.0), "explained_within": near(0.3)}
    anchor, text = headline(**noisy)
    assert anchor == "truth-in-part"
    assert "in part" in text


def test_beside_the_mean_of_the_other_responses() -> None:
    worse = figures(mse=near(0.7), baseline_mse=near(0.5))
    assert "truth-baseline-worse" in anchors(worse)
    equal = verdict(figures(mse=near(0.5), baseline_mse=near(0.52)))
    assert not [r for r in equal if r.anchor.startswith("truth-baseline")]
    assert "whether it is nearer to the truth than the mean" in equal[-1].text
    alone = anchors(figures(baseline_mse=UNKNOWN))
    assert alone == ["truth-follows", "truth-centred", "truth-mistakes-named"]


def test_mistakes() -> None:
    missed = [r for r in verdict(figures(mistake_recall=near(0.2))) if "mistake" in r.text]
    assert missed[-1].anchor == "truth-mistakes-missed"
    assert "only 20% of the responses" in missed[-1].text
    assert "recall 0.20 [0.16, 0.24] of 40 mistakes" in missed[-1].text
    assert "an exact critic's 0.93 [0.89, 0.97]" in missed[-1].text
    unsure = verdict(figures(mistake_recall=near(0.5)))
    assert "whether it names the first mistake" in unsure[-1].text
    assert "truth-mistakes-named" not in [r.anchor for r in unsure]
    assert "mistake" not in " ".join(r.text for r in verdict(figures(mistake_recall=UNKNOWN)))


@pytest.mark.parametrize("value", [0.95, 0.05])
def test_five_mistakes_are_too_few_to_say(value: float) -> None:
    of_six = anchors(figures(mistake_recall=near(value), num_mistakes=6))
    assert {"truth-mistakes-named", "truth-mistakes-missed"} & set(of_six)
    of_five = verdict(figures(mistake_recall=near(value), num_mistakes=5))
    assert not [r for r in of_five if r.anchor.startswith("truth-mistakes")]
    assert "whether it names the first mistake" in of_five[-1].text
    assert "of 5 mistakes" in of_five[-1].text


def test_what_an_exact_critic_would_miss_too_is_not_held_against_it() -> None:
    found = verdict(figures(mistake_recall=near(0.2), mistake_recall_ceiling=near(0.45)))
    assert "truth-mistakes-missed" not in [r.anchor for r in found]
    assert "whether it names the first mistake" in found[-1].text


@pytest.mark.parametrize(
    "differing",
    [
        {"flattening": Figure(0.2, 0.1, 0.4), "explained_within": Figure(0.2, 0.0, 0.4)},
        {"flattening": near(0.6), "explained_within": Figure(0.3, 0.05, 0.6)},
    ],
)
def test_an_interval_across_the_thresholds_says_nothing(differing: dict[str, Any]) -> None:
    """The point estimates alone would say flat, or in part."""
    found = verdict(figures(**differing))
    assert found[-1].anchor == "truth-too-few"
    assert "whether the critic sees what happens within a response" in found[-1].text
    others = {"truth-centred", "truth-baseline-better", "truth-mistakes-named"}
    assert {remark.anchor for remark in found[:-1]} == others


def test_too_few_prompts_say_nothing_at_all() -> None:
    (only,) = verdict(wide_figures())
    assert only.anchor == "truth-too-few"
    for question in ("prompts apart", "within a response", "too high", "nearer", "first mistake"):
        assert question in only.text
    assert "inf" not in only.text


def test_prefixes_of_their_own_say_nothing_of_mistakes() -> None:
    """No response was continued from every step."""
    alone: dict[str, Any] = dict.fromkeys(
        (
            "within_variance",
            "explained_within",
            "explained_between",
            "flattening",
            "rank_agreement",
            "mistake_recall",
            "mistake_recall_ceiling",
            "mistake_precision",
        ),
        UNKNOWN,
    )
    alone["num_responses"] = 0
    assert headline(**alone)[0] == "truth-follows"
    assert headline(**alone, explained=near(0.3))[0] == "truth-in-part"
    assert headline(**alone, explained=near(-0.3))[0] == "truth-nothing"
    found = verdict(figures(**alone, explained=wide(0.3)))
    assert "whether the critic follows the truth" in found[-1].text
    assert "mistake" not in " ".join(remark.text for remark in found)


def test_a_truth_that_does_not_move_says_so() -> None:
    still = {"explained_within": UNKNOWN, "flattening": UNKNOWN, "within_variance": near(-0.001)}
    found = verdict(figures(**still))
    assert "the truth within a response does not change beyond" in found[-1].text


def test_without_a_critic() -> None:
    assert anchors(without_critic()) == ["truth-no-critic"]


def test_every_remark_has_its_row_in_the_documentation() -> None:
    """Of the right table, with the words by which an offline page names it."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("## When value training fails")[2].partition("\n### ")[0]
    rows = dict(re.findall(r'^\| <a id="([\w-]+)"></a>(.*?) \|', table, re.MULTILINE))
    assert rows == TRUTH_ROWS
    remark = verdict(figures())[0]
    assert remark.row == (
        'docs/value_page.md, "When value training fails", row "the verdict: follows the truth"'
    )


def test_the_documentation_has_the_thresholds() -> None:
    text = PAGE.read_text(encoding="utf-8")
    names = [name for name in vars(verdict_module) if name.isupper() and name != "TRUTH_ROWS"]
    assert len(names) == 10
    for name in names:
        assert f"| `{name}` | {getattr(verdict_module, name):g} |" in text
