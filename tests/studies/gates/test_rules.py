"""The rules of `vapo gates`: each verdict on either side of what decides it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from vapo.studies.gates.rules import Gate, GateFigures, Interval, clustered_interval, judge

# the paper's situation: everything can be shown
PAPER = GateFigures(
    mean_reward=-0.2,
    mean_length=400.0,
    start_length=380.0,
    guess=Interval(-0.5, -0.6, -0.4),
    value_start=-0.9,
    value_pretrained=-0.2,
    explained_variance_start=-0.1,
    explained_variance_pretrained=0.4,
    explained_variance_oracle=0.5,
    num_iterations=30,
    unlearned_after=20,
    unlearned_between=(20, 20),
    collapsed_after=10,
    weight_adaptive=2e-9,
    weight_constant=1e-8,
    horizon_adaptive=60.0,
    horizon_constant=20.0,
    clip_fraction_high=0.02,
    share_right=0.4,
    length_variation=0.5,
    share_returned=0.1,
    prompt_visits=3.0,
)


def gates(**changes: object) -> dict[str, Gate]:
    return {g.component: g for g in judge(replace(PAPER, **changes))}  # type: ignore[arg-type]


def words(**changes: object) -> dict[str, str]:
    return {name: gate.word for name, gate in gates(**changes).items()}


def test_everything_can_be_shown_where_the_paper_stands() -> None:
    assert words() == dict.fromkeys(
        [
            "value pretraining",
            "vanilla PPO",
            "decoupled GAE",
            "length-adaptive GAE",
            "clip-higher",
            "token-level loss",
            "LM loss on right responses",
            "group sampling",
            "critic against groups",
        ],
        "can show",
    )


COLLAPSE = {"value pretraining", "vanilla PPO"}


@pytest.mark.parametrize(
    ("changes", "touched", "word"),
    [
        # a collapse needs all four
        ({"weight_adaptive": 0.01}, {"value pretraining"}, "cannot show"),
        ({"weight_constant": 0.01}, {"vanilla PPO"}, "cannot show"),
        ({"value_start": -0.39}, COLLAPSE, "cannot show"),
        ({"value_start": -0.55}, COLLAPSE, "open"),  # within the guess's interval
        ({"value_start": math.nan}, COLLAPSE, "open"),
        ({"mean_reward": -0.7}, COLLAPSE, "cannot show"),
        ({"mean_reward": -0.45}, COLLAPSE, "open"),
        ({"guess": None}, COLLAPSE, "open"),
        ({"collapsed_after": 41}, COLLAPSE, "cannot show"),  # the critic has unlearned long before
        ({"collapsed_after": 40}, COLLAPSE, "open"),
        ({"collapsed_after": 21}, COLLAPSE, "open"),
        ({"collapsed_after": 20}, set(), "can show"),
        ({"collapsed_after": None}, COLLAPSE, "cannot show"),
        ({"unlearned_between": (10, 30)}, set(), "can show"),
        ({"unlearned_between": (9, 30)}, COLLAPSE, "open"),  # in time for the upper limit alone
        ({"unlearned_between": (None, None)}, set(), "can show"),
        ({"unlearned_between": (10, None)}, set(), "can show"),
        ({"unlearned_between": (9, None)}, COLLAPSE, "open"),
        ({"collapsed_after": None, "unlearned_between": (9, None)}, COLLAPSE, "open"),
        ({"unlearned_between": (3, 4)}, COLLAPSE, "cannot show"),
        (
            {
                "collapsed_after": None,
                "unlearned_after": None,
                "unlearned_between": (None, None),
            },
            COLLAPSE,
            "open",
        ),
        # what is known not to hold decides, whatever is not known
        ({"weight_adaptive": 0.5, "weight_constant": 0.6, "guess": None}, COLLAPSE, "cannot show"),
        # one condition each
        ({"horizon_constant": 41.0}, {"decoupled GAE", "length-adaptive GAE"}, None),
        ({"mean_length": 200.0}, {"decoupled GAE"}, "cannot show"),
        ({"weight_adaptive": 1.1e-9}, set(), "can show"),
        ({"horizon_adaptive": 39.0}, {"length-adaptive GAE"}, "cannot show"),
        ({"horizon_adaptive": 39.0, "weight_adaptive": 1e-9}, set(), "can show"),
        ({"horizon_adaptive": 10.0}, set(), "can show"),  # the shorter one may be either's
        ({"horizon_adaptive": 20.0, "weight_adaptive": 0.0}, set(), "can show"),
        ({"horizon_adaptive": 20.0, "weight_adaptive": 1e-8}, {"length-adaptive GAE"}, None),
        ({"clip_fraction_high": 0.01}, {"clip-higher"}, "cannot show"),
        ({"clip_fraction_high": math.nan}, {"clip-higher"}, "open"),
        ({"length_variation": 0.2}, {"token-level loss"}, "cannot show"),
        ({"share_right": 0.04}, {"LM loss on right responses"}, "cannot show"),
        ({"share_right": 0.05}, set(), "can show"),
        ({"share_right": 0.81}, {"LM loss on right responses"}, "cannot show"),
        ({"prompt_visits": 1.0}, {"group sampling"}, "cannot show"),
        ({"explained_variance_pretrained": 0.3}, set(), "can show"),
        ({"explained_variance_pretrained": 0.29}, {"critic against groups"}, "cannot show"),
        ({"explained_variance_pretrained": math.nan}, {"critic against groups"}, "open"),
        ({"explained_variance_pretrained": None}, {"critic against groups"}, "open"),
    ],
)
def test_a_figure_decides(changes: dict[str, object], touched: set[str], word: str | None) -> None:
    found = words(**changes)
    assert {name for name, w in found.items() if w != "can show"} == touched
    assert {found[name] for name in touched} <= {word or "cannot show"}


def test_the_reasons_are_those_that_decide() -> None:
    (reason,) = gates(value_start=-0.3)["value pretraining"].reasons
    assert "-0.300" in reason
    assert "above a guess's -0.500 [-0.600, -0.400]" in reason
    assert len(gates()["value pretraining"].reasons) == 4
    (reason,) = gates(guess=None)["vanilla PPO"].reasons
    assert "--answer_now" in reason
    (reason,) = gates(collapsed_after=None, unlearned_after=None, unlearned_between=(25, None))[
        "vanilla PPO"
    ].reasons
    assert reason == (
        "T_collapse > 30 iterations, T_unlearn > 30 [25, > 30] iterations: give --num_iterations "
        "more"
    )


def test_a_race_that_is_lost_says_by_what_rule() -> None:
    lost = {"collapsed_after": 13, "unlearned_after": 3, "unlearned_between": (3, 3)}
    (reason,) = gates(**lost)["value pretraining"].reasons
    assert reason == (
        "T_collapse 13 iterations, T_unlearn 3 [3, 3] iterations (the policy has to collapse no "
        "later than the critic has unlearned; up to twice as late is open)"
    )


@pytest.mark.parametrize(
    ("changes", "component", "rule"),
    [
        ({"value_start": -0.3}, "vanilla PPO", "(below it needed)"),
        ({"mean_reward": -0.7}, "vanilla PPO", "(above it needed)"),
        ({"weight_adaptive": 0.5}, "value pretraining", "not below 0.01"),
        ({"horizon_constant": 300.0}, "decoupled GAE", "not below a tenth of the mean length"),
        (
            {"weight_adaptive": 1e-8, "horizon_adaptive": 20.0},
            "length-adaptive GAE",
            "(a factor of 10 in the weight, or of 2 in the horizon, needed)",
        ),
    ],
)
def test_cannot_show_says_its_rule(changes: dict[str, float], component: str, rule: str) -> None:
    gate = gates(**changes)[component]
    assert gate.word == "cannot show"
    assert rule in " ".join(gate.reasons)


def test_the_interval_is_of_the_prompts() -> None:
    """t(0.975, 3) = 3.182; the prompts' means 0, 0, 1, 1 have a variance of 1/3."""
    found = clustered_interval([0.0, 0.0, 1.0, 1.0])
    half = 3.182 * math.sqrt(1 / 3 / 4)
    assert (found.mean, found.high - 0.5) == pytest.approx((0.5, half), rel=0.01)
    assert 0.5 - found.low == pytest.approx(half, rel=0.01)
    assert clustered_interval([0.0, 0.0, 1.0]).low == -math.inf
