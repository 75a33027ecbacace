"""Rules between the keys of estimator `vine`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import fit_config
from tests.config.test_validation import CRITIC_FREE, problem
from vapo.config.estimators import VineOptions
from vapo.config.values import TokenSegments

VINE = ("algorithm.advantage_estimator=vine", *CRITIC_FREE)


def test_the_defaults_are_the_papers_nine_continuations(tmp_path: Path) -> None:
    algorithm = fit_config(tmp_path, *VINE).algorithm
    assert isinstance(algorithm, VineOptions)
    assert (algorithm.vine_continuations, algorithm.vine_segments.kind) == (9, "pattern")
    needs = (algorithm.has_critic, algorithm.compares_groups, algorithm.needs_greedy_baseline)
    assert needs == (False, False, False)


def test_segments_are_a_kind_of_their_own(tmp_path: Path) -> None:
    tokens = ("algorithm.vine_segments.kind=tokens", "algorithm.vine_segments.num_tokens=7")
    algorithm = fit_config(tmp_path, *VINE, *tokens).algorithm
    assert isinstance(algorithm, VineOptions)
    assert isinstance(algorithm.vine_segments, TokenSegments)
    assert algorithm.vine_segments.num_tokens == 7
    assert "it is a key of tokens" in problem(
        tmp_path, *VINE, "algorithm.vine_segments.num_tokens=7"
    )


def test_another_estimator_has_none_of_the_keys(tmp_path: Path) -> None:
    assert "it is a key of vine" in problem(tmp_path, "algorithm.vine_continuations=3")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.gamma=0.99"], "algorithm.gamma is 0.99: set algorithm.gamma=1"),
        (["rewards.shuffle=true"], "rewards.shuffle deals the rewards out anew"),
        (["training.max_staleness=1"], "training.max_staleness above 0 the engine's weights"),
        (
            ["algorithm.kl.coef=0.1", "algorithm.kl.placement=reward"],
            "algorithm.kl.placement is reward: set it to loss",
        ),
        (
            ["algorithm.vine_segments.pattern='('"],
            "algorithm.vine_segments.pattern '(' is not a regular expression",
        ),
        (
            [f"algorithm.vine_segments.pattern={'(' * 5000}"],
            "its groups are nested too deeply",
        ),
        (
            ["algorithm.vine_segments.pattern='x*'"],
            "algorithm.vine_segments.pattern 'x*' matches an empty text",
        ),
        (["algorithm.vine_continuations=0"], "algorithm.vine_continuations must be >= 1"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    assert message in problem(tmp_path, *VINE, *overrides)


def test_a_penalty_of_no_weight_is_none(tmp_path: Path) -> None:
    fit_config(tmp_path, *VINE, "algorithm.kl.placement=reward")
