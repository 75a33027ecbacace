"""avg@k, pass@k, maj@k and their interval, by hand, with a stand-in for what plays rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.judged import judged, with_verdict
from tests.tiny_model import tiny_tokenizer
from vapo import evaluation
from vapo.config.schema import EvaluationConfig, FitConfig
from vapo.environments.contract import Verdict
from vapo.errors import UserError
from vapo.evaluation import (
    clustered_mean,
    evaluate,
    majority_is_correct,
    mean_of_all,
)
from vapo.intervals import t_interval
from vapo.rewards.scorer import VerifierScorer
from vapo.rollouts.player import RolloutRunner
from vapo.system.progress import Progress
from vapo.types import FinishReason, Prompt, Rollout, Turn


class ScriptedPlayer(RolloutRunner):
    """Responses are the words of each prompt's text, in turn; `cut` marks a truncated one."""

    def __init__(self, scorer: VerifierScorer) -> None:
        self.calls: list[dict] = []
        self.config, self.scorer, self.tokenizer = FitConfig(), scorer, tiny_tokenizer()

    def play(self, prompts, *, group_size, settings, seed, advance=lambda n: None, first=0):
        self.calls.append({"settings": settings, "seed": seed, "group_size": group_size})
        rollouts = []
        for prompt in prompts:
            words = prompt.text.split()
            assert len(words) == group_size
            for word in words:
                reason = FinishReason.LENGTH if word == "cut" else FinishReason.STOP
                ids = tuple(range(2, 2 + len(word)))
                turns = (Turn(0, len(word)),)
                rollouts.append(Rollout(prompt, ids, word, (0.0,) * len(word), reason, turns))
                advance(1)
        assert isinstance(self.scorer, VerifierScorer)
        return self.scorer.score(rollouts)


class EqualityScorer(VerifierScorer):
    """Correct when the response is the answer; `cut` has no extracted answer."""

    def __init__(self): ...

    def score(self, rollouts, *, advance=lambda n: None):
        verdicts = [
            Verdict(
                is_correct=rollout.response_text == rollout.prompt.answer,
                reward=1.0 if rollout.response_text == rollout.prompt.answer else -1.0,
                extracted=None if rollout.response_text == "cut" else rollout.response_text,
                failure="timeout" if rollout.response_text == "slow" else None,
            )
            for rollout in rollouts
        ]
        return judged(rollouts, verdicts)

    def extracts_answers(self, source=""):
        return True

    def votes(self, rollouts, *, group_size):
        return by_text(rollouts)


def by_text(rollouts: list[Rollout]) -> list[int | None]:
    """Equal texts have equal votes."""
    texts = [rollout.extracted for rollout in rollouts]
    return [None if text is None else texts.index(text) for text in texts]


class CountingProgress(Progress):
    def __init__(self) -> None:
        self.done: dict[str, float] = {}
        self.totals: dict[str, tuple[float | None, str]] = {}

    @contextmanager
    def stage(self, name: str, total: float | None = None, unit: str = "items") -> Iterator:
        self.totals[name] = (total, unit)
        self.done[name] = 0

        def advance(n: float = 1) -> None:
            self.done[name] += n

        yield advance


def run(texts: list[str], answers: str, **options):
    prompts = [Prompt(f"p{i}", t, (2,), a) for i, (t, a) in enumerate(zip(texts, answers))]  # noqa: B905
    sampler, progress = ScriptedPlayer(EqualityScorer()), CountingProgress()
    result = evaluate(
        prompts,
        player=sampler,
        config=EvaluationConfig(k=len(texts[0].split()), **options),
        max_response_tokens=50,
        progress=progress,
    )
    return result, sampler, progress


FIVE = ["a a b cut", "b b b a", "a b c cut", "cut cut cut a", "b a a b"]


def test_metrics_by_hand():
    """Five prompts, answer `a`, k = 4.

    correct: 2/4, 1/4, 1/4, 1/4, 2/4 -> avg 0.35; every prompt has one -> pass 1.
    majority: a (right), b, a (tie of three, first seen), None, b (tie with a, first seen) -> 2/5.
    """
    metrics = run(FIVE, "aaaaa")[0].metrics
    assert metrics["eval/avg_at_k"] == pytest.approx(0.35)
    assert metrics["eval/pass_at_k"] == pytest.approx(1.0)
    assert metrics["eval/maj_at_k"] == pytest.approx(0.4)
    assert metrics["eval/num_prompts"] == 5
    assert metrics["eval/truncation_rate"] == pytest.approx(5 / 20)
    assert metrics["eval/response_length_mean"] == pytest.approx((5 * 3 + 15) / 20)


def test_interval_is_over_prompts():
    """Means 0.5, 0.25, 0.25, 0.25, 0.5: std sqrt(0.01875), standard error 0.0612372;
    t(0.975, 4) = 2.776445, so 0.35 +- 0.170021.
    """
    metrics = run(FIVE, "aaaaa")[0].metrics
    assert metrics["eval/avg_at_k_ci_low"] == pytest.approx(0.179979, abs=1e-6)
    assert metrics["eval/avg_at_k_ci_high"] == pytest.approx(0.520021, abs=1e-6)


def test_interval_ignores_how_often_a_prompt_is_sampled():
    """Copies of the same verdicts are no new evidence: k = 8 gives the interval of k = 4."""
    once = run(FIVE, "aaaaa")[0].metrics
    twice = run([f"{text} {text}" for text in FIVE], "aaaaa")[0].metrics
    for key in ("eval/avg_at_k", "eval/avg_at_k_ci_low", "eval/avg_at_k_ci_high"):
        assert twice[key] == pytest.approx(once[key])


def test_interval_is_clipped_and_with_few_prompts_the_whole_range():
    metrics = run(["a", "a", "a", "b"], "aaaa")[0].metrics
    assert metrics["eval/avg_at_k_ci_high"] == 1.0
    assert 0 <= metrics["eval/avg_at_k_ci_low"] < 0.75
    few = run(["a", "b"], "aa")[0].metrics
    assert (few["eval/avg_at_k_ci_low"], few["eval/avg_at_k_ci_high"]) == (0.0, 1.0)


def test_responses_without_a_verdict_are_counted_apart():
    metrics = run(["a slow", "a a", "slow slow", "a b"], "aaaa")[0].metrics
    assert metrics["eval/failure_rate"] == 3 / 8
    assert metrics["eval/avg_at_k"] == 4 / 8
    assert run(FIVE, "aaaaa")[0].metrics["eval/failure_rate"] == 0


@pytest.mark.parametrize(("text", "low", "high"), [("b", 0.0, 0.434482), ("a", 0.565518, 1.0)])
def test_all_wrong_or_all_right_is_wilsons_interval(text: str, low: float, high: float):
    """Of 5 prompts: z^2 / (5 + z^2) = 3.841459 / 8.841459."""
    metrics = run([text] * 5, "aaaaa")[0].metrics
    assert metrics["eval/avg_at_k_ci_low"] == pytest.approx(low, abs=1e-6)
    assert metrics["eval/avg_at_k_ci_high"] == pytest.approx(high, abs=1e-6)


@pytest.mark.parametrize(
    ("degrees", "expected"), [(3, 3.182446), (4, 2.776445), (9, 2.262157), (29, 2.045230)]
)
def test_the_interval_is_students_t(degrees, expected):
    """The quantiles at 0.975 of any table of the distribution."""
    low, high = t_interval(1.0, 1.0, degrees + 1)
    assert high - 1.0 == pytest.approx(expected, rel=1e-6)
    assert 1.0 - low == pytest.approx(expected, rel=1e-6)


def test_means_are_over_the_prompts_of_all_ranks(monkeypatch):
    """Another rank has 0.25, 0.25 and 0.5; one without a prompt adds nothing."""
    whole = clustered_mean(torch.tensor([0.5, 0.25, 0.25, 0.25, 0.5]))
    other = torch.tensor([1.0, 0.375, 3.0], dtype=torch.float64)
    monkeypatch.setattr(evaluation, "sum_over_ranks", lambda own: own + other)
    assert clustered_mean(torch.tensor([0.5, 0.25])) == pytest.approx(whole)
    assert clustered_mean(torch.zeros(0))["num_prompts"] == 3
    monkeypatch.setattr(evaluation, "sum_over_ranks", lambda own: own + other[[0, 2]])
    assert mean_of_all([2, 4]) == 7 / 5
    assert mean_of_all([]) == 1 / 3


def responses(*answers: str | None) -> list[Rollout]:
    return [response(Verdict(answer == "a", 0.0, extracted=answer)) for answer in answers]


def response(verdict: Verdict) -> Rollout:
    sampled = Rollout(Prompt("p", "", (2,), "a"), (3,), "", (0.0,), FinishReason.STOP)
    return with_verdict(sampled, verdict)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["a"], True),
        (["b", "a", "a"], True),
        (["a", "b", "b"], False),
        (["a", "b", "b", "a"], True),
        (["b", "a", "a", "b"], False),
        ([None, None, "a"], False),
        (["a", None, None, "a"], True),
        ([None, "a", "a", None], False),
        ([None], False),
    ],
)
def test_majority(answers, expected):
    given = responses(*answers)
    assert majority_is_correct(given, by_text(given)) is expected


def test_an_unextracted_majority_is_wrong_even_if_a_verdict_says_correct():
    assert not majority_is_correct([response(Verdict(True, 1.0))] * 3, [None] * 3)


def test_equal_votes_are_for_one_answer_however_it_is_written():
    given = responses("a", "b", "a", "B")
    assert majority_is_correct(given, [0, 1, 0, 3])
    assert not majority_is_correct([*given, *responses("b.")], [0, 1, 0, 1, 1])


def test_without_answers_there_is_no_majority():
    class NoAnswers(EqualityScorer):
        def extracts_answers(self, source=""):
            return False

        def votes(self, rollouts, *, group_size):
            raise AssertionError("there is nothing to vote on")

    prompts = [Prompt("p", "a a b", (2,), "a")]
    metrics = evaluate(
        prompts,
        player=ScriptedPlayer(NoAnswers()),
        config=EvaluationConfig(k=3),
        max_response_tokens=50,
        progress=CountingProgress(),
    ).metrics
    assert "eval/maj_at_k" not in metrics
    assert metrics["eval/pass_at_k"] == 1.0


def test_the_evaluation_has_its_own_settings_and_seed():
    _, sampler, _ = run(["a b"], "a", temperature=0.8, top_p=0.7, top_k=3, seed=5)
    _, same, _ = run(["a b"], "a", seed=5)
    _, other, _ = run(["a b"], "a", seed=6)
    call = sampler.calls[0]
    settings = call["settings"]
    assert (settings.temperature, settings.top_p, settings.top_k) == (0.8, 0.7, 3)
    assert settings.max_response_tokens == 50
    assert call["group_size"] == 2
    assert call["seed"] == same.calls[0]["seed"] != other.calls[0]["seed"]
    _, sampler, _ = run(["a b"], "a", max_response_tokens=9)
    assert sampler.calls[0]["settings"].max_response_tokens == 9


def test_num_prompts_takes_the_first():
    result, _, _ = run(FIVE, "aaaaa", num_prompts=2)
    assert result.metrics["eval/num_prompts"] == 2
    assert result.metrics["eval/avg_at_k"] == pytest.approx(3 / 8)


def test_progress_counts_responses():
    _, _, progress = run(FIVE, "aaaaa")
    assert progress.totals["evaluation"] == (20, "responses")
    assert progress.done == {"evaluation": 20}


def test_table_rows_start_with_one_response_of_each_prompt():
    result, _, _ = run(["a slow", "cut a"], "ab", num_table_rows=3)
    assert result.rows == [
        {
            "prompt": "a slow",
            "answer": "a",
            "response": "a",
            "extracted": "a",
            "verdict": "correct",
            "reward": 1.0,
            "length": 1,
            "finish_reason": "stop",
            "k": 0,
        },
        {
            "prompt": "cut a",
            "answer": "b",
            "response": "cut",
            "extracted": None,
            "verdict": "incorrect",
            "reward": -1.0,
            "length": 3,
            "finish_reason": "length",
            "k": 0,
        },
        {
            "prompt": "a slow",
            "answer": "a",
            "response": "slow",
            "extracted": "slow",
            "verdict": "failed: timeout",
            "reward": -1.0,
            "length": 4,
            "finish_reason": "stop",
            "k": 1,
        },
    ]
    assert math.isfinite(result.metrics["eval/avg_at_k"])


def test_no_prompts():
    with pytest.raises(UserError, match="no prompts"):
        evaluate(
            [],
            player=ScriptedPlayer(EqualityScorer()),
            config=EvaluationConfig(),
            max_response_tokens=5,
            progress=CountingProgress(),
        )
