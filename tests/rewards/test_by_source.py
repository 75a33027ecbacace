"""A mixture's responses, each by the verifier of its own source."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.rewards.rollouts_for_tests import rollout, scorer_of
from vapo.config.kinds import make
from vapo.config.schema import DataConfig, MixtureSource, RewardConfig, SourceConfig
from vapo.errors import UserError
from vapo.rewards.text_judge import rewards_by_source
from vapo.types import Rollout


def of(source: str, text: str, answer: str = "42") -> Rollout:
    made = rollout(text, answer)
    return replace(made, prompt=replace(made.prompt, source=source))


def data(**own: Any) -> DataConfig:
    return DataConfig(
        train=make(
            SourceConfig,
            kind="mixture",
            sources={
                "plain": make(MixtureSource, path="a"),
                "marked": make(MixtureSource, path="b", verifier="regex", pattern=r"=(\d+)"),
                "also_plain": make(MixtureSource, path="c", verifier="exact"),
                **({"own": make(MixtureSource, path="d", verifier="python", **own)} if own else {}),
            },
        ),
    )


def test_each_source_has_its_verifier_and_the_order_stays() -> None:
    rewards = make(RewardConfig, verifier="exact", correct=2.0, incorrect=0.5, num_workers=1)
    advanced: list[int] = []
    rollouts = [
        of("plain", "42"),
        of("marked", "x =42 y"),
        of("plain", "x =42 y"),
        of("marked", "42"),
        of("also_plain", "41"),
        of("marked", "=42 =41"),
    ]
    with scorer_of(rewards, max_response_tokens=9, data=data()) as scorer:
        assert len(scorer.judges) == 2  # one setting, one pool
        verdicts = scorer.score(rollouts, advance=advanced.append)
    assert [v.is_correct for v in verdicts] == [True, True, False, False, False, False]
    assert [v.reward for v in verdicts] == [2.0, 2.0, 0.5, 0.5, 0.5, 0.5]
    assert [v.extracted for v in verdicts[:2]] == ["42", "42"]
    assert sum(advanced) == 6


def test_sources_without_a_verifier_of_their_own_share_one() -> None:
    rewards = make(RewardConfig, verifier="exact")
    plain = DataConfig(train=make(SourceConfig, path="a"))
    assert rewards_by_source(rewards, plain) == {"": rewards}
    for given in (None, plain):
        with scorer_of(rewards, max_response_tokens=9, data=given) as scorer:
            assert [judge.config for judge in scorer.judges] == [rewards]


def test_the_held_out_source_of_its_own_has_the_general_verifier() -> None:
    rewards = make(RewardConfig, verifier="exact")
    mixed = data()
    mixed.heldout = make(SourceConfig, path="h")
    by_source = rewards_by_source(rewards, mixed)
    assert by_source[""] is rewards
    assert (by_source["marked"].verifier, by_source["marked"].pattern) == ("regex", r"=(\d+)")  # type: ignore[attr-defined]


def test_a_bad_verifier_of_one_source_stops_the_run_before_it() -> None:
    with pytest.raises(UserError, match="cannot import no_such_module:f"):
        scorer_of(
            make(RewardConfig, verifier="exact", num_workers=1),
            max_response_tokens=9,
            data=data(function="no_such_module:f"),
        )
