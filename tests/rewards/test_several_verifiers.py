"""Several verifiers of one response: a weighted sum of rewards, and each fails alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rewards.rollouts_for_tests import rollout, scorer
from vapo.advantages.estimators import group_relative_apart
from vapo.commands.trials import is_unanswered, which_part
from vapo.config import FitConfig, resolve
from vapo.config.kinds import make
from vapo.config.loading import load_config
from vapo.config.rewards import RewardConfig, WeightedVerifier
from vapo.errors import UserError
from vapo.functional.baselines import group_relative_apart_advantages
from vapo.rewards.scorer import VerifierScorer, with_shuffled_verdicts
from vapo.rollouts.batch import make_rollout_batch, verifier_metrics
from vapo.types import EvaluatedBatch

FORM = """\
def form(response_text, answer, metadata):
    if "boom" in response_text:
        raise ValueError("no form")
    return 0.5 if "<b>" in response_text else 0.0
"""


def block(verifier: str, weight: float = 1.0, **options: Any) -> Any:
    return make(WeightedVerifier, verifier=verifier, weight=weight, **options)


def two(tmp_path: Path, **options: Any) -> VerifierScorer:
    (tmp_path / "mine.py").write_text(FORM)
    verifiers = {
        "answer": block("regex", 2.0, pattern=r"=(\d+)"),
        "form": block("python", 0.2, function=f"{tmp_path}/mine.py:form"),
    }
    return scorer("several", verifiers=verifiers, num_workers=1, **options)


def test_rewards_are_summed_with_their_weights_and_the_first_decides(tmp_path: Path) -> None:
    with two(tmp_path) as judge:
        right, half, wrong, failed = judge.score(
            [rollout("<b> =42"), rollout("=42"), rollout("<b> =41"), rollout("boom =42")]
        )
    assert (right.is_correct, right.reward) == (True, pytest.approx(2.0 + 0.2 * 0.5))
    assert (half.is_correct, half.reward) == (True, pytest.approx(2.0))
    assert (wrong.is_correct, wrong.reward) == (False, pytest.approx(-2.0 + 0.2 * 0.5))
    assert right.extracted == "42"
    assert wrong.by_verifier == {
        "answer": {"is_correct": False, "reward": -1.0, "extracted": "41", "failure": None},
        "form": {"is_correct": False, "reward": 0.5, "extracted": None, "failure": None},
    }
    # the second verifier's failure costs its own reward alone
    assert (failed.is_correct, failed.failure) == (True, None)
    assert failed.reward == pytest.approx(2.0 - 0.2)
    assert str(failed.by_verifier["form"]["failure"]).startswith("error: ValueError: no form")


def test_another_verifier_may_decide_and_its_failure_is_the_responses(tmp_path: Path) -> None:
    with two(tmp_path, correct_by="form", correct=0.5, incorrect=0.0) as judge:
        marked, failed = judge.score([rollout("<b> =41"), rollout("boom =42")])
    assert (marked.is_correct, marked.reward, marked.extracted) == (True, 0.1, None)
    assert (failed.is_correct, failed.reward) == (False, 1.0)
    assert str(failed.failure).startswith("error")


def test_a_reward_that_its_weight_makes_too_large_fails_alone(tmp_path: Path) -> None:
    """A square of it would be infinite in float32."""
    (tmp_path / "large.py").write_text(
        "def large(response_text, answer, metadata):\n    return 1e12"
    )
    verifiers = {
        "answer": block("exact"),
        "large": block("python", 1e9, function=f"{tmp_path}/large.py:large"),
    }
    with scorer("several", verifiers=verifiers, num_workers=1) as judge:
        (verdict,) = judge.score([rollout("42")])
    assert verdict.reward == 1.0 - 1e9  # as of any failure: incorrect, times the weight
    failure = str(verdict.by_verifier["large"]["failure"])
    assert failure == "error: the reward 1e+12 times its weight is above 5e+11"


TAGS = """\
def tags(response_text, answer, metadata):
    return response_text.startswith("<think>")
"""


@pytest.mark.parametrize(
    ("reads_thoughts", "response", "is_correct", "has_form"),
    [
        (True, "<think>41</think> 42", True, True),
        (False, "<think>41</think> 42", True, False),
        (True, "<think>42", False, True),  # no answer, and yet a verdict of the form
        (False, "<think>42", False, False),
        (True, "</think>42", True, False),
    ],
)
def test_a_verifier_of_the_form_reads_the_thoughts_and_the_others_the_answer(
    tmp_path: Path, reads_thoughts: bool, response: str, is_correct: bool, has_form: bool
) -> None:
    (tmp_path / "mine.py").write_text(TAGS)
    function = f"{tmp_path}/mine.py:tags"
    form = block("python", 0.2, function=function, reads_thoughts=reads_thoughts)
    rewards = {"verifiers": {"answer": block("exact"), "form": form}, "answer_after": "</think>"}
    with scorer("several", num_workers=1, **rewards) as judge:
        (judged,) = judge.score([rollout(response)])
        part = which_part(judge.judges[0].config, response)
    assert judged.is_correct == is_correct
    assert judged.by_verifier["form"]["is_correct"] == has_form
    assert judged.reward == pytest.approx((1 if is_correct else -1) + (0.2 if has_form else -0.2))
    assert part.endswith("; all of it by form (reads_thoughts)") == reads_thoughts


def test_a_response_is_unanswered_where_the_deciding_verifier_needs_an_answer() -> None:
    verifiers = {"answer": block("exact"), "form": block("exact", reads_thoughts=True)}
    options = {"verifier": "several", "verifiers": verifiers, "answer_after": "</think>"}
    assert is_unanswered(make(RewardConfig, **options), "42")
    assert not is_unanswered(make(RewardConfig, **options), "</think>42")
    assert not is_unanswered(make(RewardConfig, **options, correct_by="form"), "42")


def test_a_verifier_that_never_gives_a_verdict_ends_the_run(tmp_path: Path) -> None:
    with two(tmp_path) as judge, pytest.raises(UserError, match=r"mine.py:form \(form\) gave no"):
        judge.score([rollout("boom =42")] * 8)


def test_a_bad_verifier_is_named_before_anything_is_judged() -> None:
    verifiers = {"answer": block("exact"), "form": block("python", function="no_such:f")}
    with pytest.raises(UserError, match=r"rewards\.verifiers\.form: .*cannot import no_such:f"):
        scorer("several", verifiers=verifiers, num_workers=1)


def test_answers_vote_by_the_deciding_verifier(tmp_path: Path) -> None:
    with two(tmp_path) as judge:
        judged = judge.score([rollout("=42"), rollout("=41"), rollout("x =42")])
        assert judge.extracts_answers()
        assert judge.votes(judged, group_size=3) == [0, 1, 0]
    with two(tmp_path, correct_by="form") as judge:
        assert not judge.extracts_answers()


def test_metrics_of_each_verifier_and_dealt_verdicts_keep_them(tmp_path: Path) -> None:
    texts = ("<b> =42", "=41", "boom =42", "=42")
    with two(tmp_path) as judge:
        judged = judge.score([rollout(text) for text in texts])
        rewards = judge.judges[0].config
    batch = make_rollout_batch(judged, group_size=4, rewards=rewards, max_response_tokens=9)
    assert verifier_metrics(batch, rewards) == {
        "verifier_answer/failures": 0.0,
        "verifier_answer/reward_mean": 0.5,
        "verifier_answer/accuracy": 0.75,
        "verifier_form/failures": 1.0,
        "verifier_form/reward_mean": pytest.approx((0.5 + 0 - 1 + 0) / 4),
        "verifier_form/accuracy": 0.0,
    }
    dealt = with_shuffled_verdicts(judged, seed=1)
    assert [r.response_text for r in dealt] == list(texts)
    for row in dealt:
        parts = row.by_verifier
        assert row.reward == pytest.approx(
            2 * parts["answer"]["reward"] + 0.2 * parts["form"]["reward"]
        )
    assert [r.by_verifier for r in dealt] != [r.by_verifier for r in judged]


def test_rewards_apart_tell_groups_that_their_sum_cannot() -> None:
    rewards = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 1]], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    found = group_relative_apart_advantages(rewards, weights, group_size=2)
    # each column by hand: (1, 0) of two has the deviation 0.7071 and is (+0.7071, -0.7071)
    root = 0.5**0.5
    summed = [root - root / 2, root / 2 - root, root, -root]
    scale = (sum(x * x for x in summed) / 4) ** 0.5
    assert found.tolist() == pytest.approx([x / scale for x in summed], abs=1e-5)
    # with equal weights the first group's sums are equal: summed first, it has no contrast
    equal = group_relative_apart_advantages(rewards, torch.tensor([1.0, 0.4]), group_size=2)
    assert abs(float(equal[0])) > 0.1


def test_fillers_do_not_count_in_the_scale() -> None:
    rewards = torch.tensor([[1.0], [0.0], [1.0], [1.0]])
    one = torch.ones(1)
    counted = torch.tensor([True, True, False, False])
    found = group_relative_apart_advantages(rewards, one, group_size=2, counted=counted)
    assert found.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-5)
    all_count = group_relative_apart_advantages(rewards, one, group_size=2)
    assert all_count.tolist() == pytest.approx([2**0.5, -(2**0.5), 0.0, 0.0], abs=1e-5)


SEVERAL = (
    "rewards.verifier=several",
    "rewards.verifiers.answer.verifier=regex",
    r"rewards.verifiers.answer.pattern=;(\d)$",
    "rewards.verifiers.form.verifier=exact",
    "rewards.verifiers.form.weight=0.5",
)
APART = ("algorithm.advantage_estimator=group_relative_apart",)
TASK, GRPO = Path("conf/vapo.yaml"), Path("conf/algorithm/grpo.yaml")


def test_the_estimator_reads_what_each_verifier_gave() -> None:
    config = load_config(FitConfig, [TASK, GRPO], [*SEVERAL, *APART])
    hyperparameters = resolve(config)
    assert hyperparameters.verifier_weights == {"answer": 1.0, "form": 0.5}
    with VerifierScorer(config) as judge:
        judged = judge.score([rollout(";4", "4"), rollout("4", "4"), rollout("4", "4")])
    batch = make_rollout_batch(judged, group_size=3, rewards=config.rewards, max_response_tokens=9)
    estimate = group_relative_apart(
        EvaluatedBatch(**vars(batch)), batch.turn_rewards, hyperparameters
    )
    # both verifiers differ on the first response alone: 2/sqrt(12) and -4/sqrt(12) deviations
    assert estimate.advantages is not None
    assert estimate.advantages[:, 0].tolist() == pytest.approx([2**0.5, -(0.5**0.5), -(0.5**0.5)])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rewards.verifier=several",), "needs verifiers by name in rewards.verifiers"),
        (
            (*SEVERAL, "rewards.correct_by=other"),
            "correct_by other is not a verifier of .* answer, form",
        ),
        (("rewards.verifier=several", "rewards.verifiers.A-b.verifier=exact"), "'A-b' becomes"),
        (
            (*SEVERAL, "rewards.verifiers.answer.weight=0", "rewards.verifiers.form.weight=0"),
            "all weights are 0",
        ),
        (
            (*SEVERAL, "rewards.verifiers.answer.weight=-6e11"),
            r"answer\.weight -6e\+11 times the reward 1 is too large",
        ),
        (
            (*SEVERAL, "rewards.verifiers.answer.pattern=x"),
            r"rewards\.verifiers\.answer\.pattern .*needs a group",
        ),
        (
            ("rewards.verifier=several", "rewards.verifiers=[{verifier: math}]"),
            "rewards.verifiers is a block of keys",
        ),
        (
            (*SEVERAL, "rewards.verifiers.form.reads_thoughts=true"),
            r"form\.reads_thoughts has no effect without rewards\.answer_after",
        ),
        (APART, "set rewards.verifier=several"),
        ((*SEVERAL, *APART, "rewards.overlong.soft_punishment=true"), "soft_punishment is added"),
        (
            (*SEVERAL, *APART, "algorithm.kl.coef=0.1", "algorithm.kl.placement=reward"),
            "set algorithm.kl.placement=loss",
        ),
    ],
)
def test_what_cannot_work_is_one_error(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(FitConfig, [TASK, GRPO], list(overrides))
