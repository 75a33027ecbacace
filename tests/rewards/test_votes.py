"""maj@k: which responses vote together, and verifiers that say nothing of an answer."""

from __future__ import annotations

import logging
from itertools import combinations, permutations
from pathlib import Path

import pytest

from tests.evaluation.test_evaluation import CountingProgress, ScriptedPlayer
from tests.rewards.rollouts_for_tests import hostile, rollout, scorer, scorer_of
from vapo.config.kinds import make
from vapo.config.schema import (
    DataConfig,
    EvaluationConfig,
    MixtureSource,
    RewardConfig,
    SourceConfig,
)
from vapo.evaluation import evaluate, majority_is_correct
from vapo.rewards.answer_equality import vote_classes
from vapo.rewards.scorer import VerifierScorer
from vapo.types import Prompt

DIGIT = r"(\d+)"
SPLIT = [
    r"\boxed{3}",
    r"\boxed{\sqrt{8}}",
    r"\boxed{3.0}",
    r"\boxed{2\sqrt{2}}",
    r"\boxed{8^{1/2}}",
]
"""The right answer, 3, is given twice; the same wrong one three times, in three spellings."""


def votes_of(
    judge: VerifierScorer, texts: list[str], answer: str, group_size: int
) -> list[int | None]:
    rollouts = [rollout(text, answer) for text in texts]
    return judge.votes(judge.score(rollouts), group_size=group_size)


def evaluated(
    judge: VerifierScorer, *texts: str, sources: tuple[str, ...] = ("",)
) -> dict[str, float]:
    """Metrics of prompts whose responses are the words of `texts`; the answer is 42."""
    pairs = zip(texts, [*sources, *sources][: len(texts)], strict=True)
    prompts = [Prompt(f"p{i}", t, (2,), "42", source=s) for i, (t, s) in enumerate(pairs)]
    return evaluate(
        prompts,
        player=ScriptedPlayer(judge),
        config=EvaluationConfig(k=len(texts[0].split())),
        max_response_tokens=50,
        progress=CountingProgress(),
    ).metrics


def test_wrong_answers_vote_together_by_value_as_right_ones_do():
    with scorer("math", num_workers=1) as math:
        rollouts = [rollout(text, "3") for text in SPLIT]
        rollouts = math.score(rollouts)
        votes = math.votes(rollouts, group_size=5)
    assert [r.is_correct for r in rollouts] == [True, False, True, False, False]
    assert votes == [0, 1, 0, 1, 1]
    assert not majority_is_correct(rollouts, votes)


def test_the_metric_elects_the_wrong_value_in_three_spellings():
    with scorer("math", num_workers=1) as math:
        wrong = evaluated(
            math, r"\boxed{42} \boxed{\sqrt8} \boxed{42.0} \boxed{2\sqrt2} \boxed{8^{1/2}}"
        )
        right = evaluated(math, r"\boxed{42} \boxed{\sqrt8} \boxed{42.0} \boxed{3} \boxed{84/2}")
    assert (wrong["eval/maj_at_k"], right["eval/maj_at_k"]) == (0.0, 1.0)


def test_groups_vote_by_themselves_and_no_answer_is_no_vote():
    texts = [r"\boxed{1}", r"\boxed{1.0}", "none at all", r"\boxed{}", r"\boxed{1}", r"\boxed{2}"]
    with scorer("math", num_workers=2) as math:
        assert votes_of(math, texts, "1", 3) == [0, 0, None, None, 1, 2]
        assert votes_of(math, [], "1", 3) == []


def test_long_answers_that_are_cut_in_the_table_are_compared_whole():
    long = "1+" * 110
    texts = [f"\\boxed{{{long}{end}}}" for end in ("3", "4", "3.0", "4")]
    with scorer("math", num_workers=1) as math:
        assert votes_of(math, texts, "0", 4) == [0, 1, 0, 1]


def test_other_verifiers_answers_are_their_texts():
    with scorer("regex", pattern=r"is (\S+)") as regex:
        assert votes_of(regex, ["is 1", "is 1.0", "so is 1", "?"], "1", 4) == [0, 1, 0, None]
    with scorer("exact") as exact:
        assert votes_of(exact, ["1", " 1", "1.0", ""], "1", 4) == [0, 0, 2, None]


def test_groups_that_take_too_long_vote_by_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with scorer("math", num_workers=1) as math:
        rollouts = [rollout(text, "3") for text in SPLIT]
        rollouts = math.score(rollouts)
        monkeypatch.setattr(
            math.judges[0].deciding.pool,
            "run",
            lambda tasks, on_reply: on_reply(0, {"failure": "timeout"}),
        )
        with caplog.at_level(logging.WARNING):
            assert math.votes(rollouts, group_size=5) == [0, 1, 2, 3, 4]
    assert "answers to 1 of 1 prompts could not be compared" in caplog.text


def test_a_verifier_that_extracts_no_answer_has_no_majority():
    """Its prompts are not 0 % right by majority: nothing is known of their majority."""
    with hostile("last_word", num_workers=1) as python:
        metrics = evaluated(python, "42 42 41")
    assert metrics["eval/pass_at_k"] == 1.0
    assert "eval/maj_at_k" not in metrics


def test_a_mixture_has_the_majority_of_the_sources_that_extract_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_votes.py").write_text("def f(text, answer, metadata): return text == answer\n")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rows.jsonl"
    sources = {
        "own": make(
            MixtureSource, kind="jsonl", path=str(file), verifier="python", function="my_votes:f"
        ),
        "plain": make(MixtureSource, kind="jsonl", path=str(file), verifier="exact"),
    }
    data = DataConfig(train=make(SourceConfig, kind="mixture", sources=sources))
    rewards = make(RewardConfig, verifier="exact", num_workers=1)
    with scorer_of(rewards, max_response_tokens=9, data=data) as judge:
        metrics = evaluated(judge, "42 42 41", "42 42 41", sources=("own", "plain"))
    assert "eval/maj_at_k" not in metrics
    assert "eval_own/maj_at_k" not in metrics
    assert metrics["eval_plain/maj_at_k"] == 1.0
    assert metrics["eval_own/pass_at_k"] == 1.0


@pytest.mark.parametrize(
    "answers",
    [
        (r"50\%", "50", "0.5"),
        (r"5\text{ cm}", "5", r"5\text{ m}"),
        ("x=5", "5=x", "2x=10"),
        (r"5\text{ apples}", "5", r"5\text{ days}"),
        (r"\text{(C) }12", "C", "12"),
    ],
)
def test_classes_do_not_depend_on_the_order_of_the_answers(answers: tuple[str, ...]):
    found = set()
    for order in permutations(answers):
        classes = vote_classes(order)
        pairs = combinations(range(len(order)), 2)
        found.add(
            frozenset(frozenset({order[i], order[j]}) for i, j in pairs if classes[i] == classes[j])
        )
    assert len(found) == 1


@pytest.mark.parametrize("verifier", ["exact", "regex", "math", "reasoning_gym"])
def test_verifiers_that_extract_answers(verifier: str):
    fields = {"pattern": DIGIT} if verifier == "regex" else {}
    with scorer(verifier, num_workers=1, **fields) as judge:
        assert judge.extracts_answers()
