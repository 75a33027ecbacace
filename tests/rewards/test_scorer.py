"""The scorer: rewards, order, progress, the shuffled control, and settings refused early."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from tests.judged import verdict_of
from tests.rewards.rollouts_for_tests import HOSTILE, hostile, rollout, scorer, scorer_of
from vapo.config.kinds import make
from vapo.config.rewards import OverlongConfig, RewardConfig
from vapo.environments.contract import Verdict
from vapo.errors import UserError
from vapo.rewards.scorer import with_shuffled_verdicts

DIGIT = r"(\d+)"


def test_rewards_are_the_configured_ones_in_order():
    answers = [rollout("42"), rollout("41"), rollout("42")]
    with scorer("exact") as exact, scorer("regex", pattern=DIGIT) as regex:
        assert exact.score(answers) == regex.score(answers)
        assert [v.reward for v in exact.score(answers)] == [1.0, -1.0, 1.0]
    with scorer("exact", correct=0.5, incorrect=0.0) as own:
        assert [v.reward for v in own.score(answers)] == [0.5, 0.0, 0.5]
        assert own.score([]) == []


def test_many_verdicts_keep_their_order_and_report_progress():
    with scorer("regex", pattern=DIGIT, num_workers=3) as regex:
        done: list[int] = []
        rollouts = [rollout(f"x{i}", answer=str(i - i % 2)) for i in range(257)]
        verdicts = regex.score(rollouts, advance=done.append)
    assert [v.extracted for v in verdicts] == [str(i) for i in range(257)]
    assert [v.is_correct for v in verdicts] == [i % 2 == 0 for i in range(257)]
    assert sum(done) == 257


def test_warm_batch_of_256_takes_less_than_100_ms():
    """The verdicts of a batch: the tests' own checks of a rollout's shapes take as long again."""
    with scorer("regex", pattern=DIGIT) as regex:
        regex.score([rollout("1")])
        rollouts = [rollout(f"x{i}" * 20) for i in range(256)]
        times: list[float] = []
        while len(times) < 50 and not (times and min(times) < 0.1):  # other processes may want it
            verdicts: list[Verdict] = []
            start = time.perf_counter()
            for one in rollouts:
                regex.submit(one, verdicts.append)
            while len(verdicts) < len(rollouts):
                regex.poll(1.0)
            times.append(time.perf_counter() - start)
    assert min(times) < 0.1


def test_math_through_the_workers():
    with scorer("math", num_workers=1) as math:
        texts = [r"\boxed{42}", "The answer is 42", r"\boxed{41}", "\ud800 42"]
        assert [v.is_correct for v in math.score([rollout(t) for t in texts])] == [
            True,
            True,
            False,
            True,
        ]


def test_python_function_verdict_and_own_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with hostile("last_word", num_workers=1, correct=2.0) as python:
        verdicts = python.score([rollout("so 42"), rollout("no")])
        assert list(map(verdict_of, verdicts)) == [Verdict(True, 2.0), Verdict(False, -1.0)]
    with hostile("own_reward", num_workers=1) as python:
        verdicts = python.score([rollout("42", bonus=1.0), rollout("41", bonus=2.0)])
        assert list(map(verdict_of, verdicts)) == [Verdict(True, 1.25), Verdict(False, 2.25)]
    function = "tests.rewards.numpy_verifiers:numpy_bool"
    with scorer("python", function=function, num_workers=1) as python:
        assert verdict_of(*python.score([rollout("42")])) == Verdict(True, 1.0)
    (tmp_path / "my_rewards.py").write_text("def f(text, answer, metadata): return True\n")
    monkeypatch.chdir(tmp_path)  # found in the working folder, as with `vapo fit`
    with scorer("python", function="my_rewards:f", num_workers=1) as python:
        assert python.score([rollout("")])[0].is_correct


def test_shuffled_verdicts_are_a_seeded_permutation():
    rollouts = [rollout("42" if i < 20 else "0", answer="42") for i in range(64)]
    with scorer("exact") as exact:
        rollouts = exact.score(rollouts)
    plain = [verdict_of(r) for r in rollouts]

    def shuffled(seed: int) -> list[Verdict]:
        found = with_shuffled_verdicts(rollouts, seed)
        assert [r.response_text for r in found] == [r.response_text for r in rollouts]
        return [verdict_of(r) for r in found]

    dealt = shuffled(3)
    assert dealt == shuffled(3)
    assert dealt != shuffled(4)
    assert dealt != plain
    assert sorted(v.reward for v in dealt) == sorted(v.reward for v in plain)
    assert sum(v.is_correct for v in dealt[:20]) < 15  # the relation to the text is gone


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"verifier": "regex", "pattern": "(a"}, "does not compile"),
        ({"verifier": "python", "function": "nowhere:f"}, "there is no module nowhere"),
        ({"verifier": "python", "function": f"{HOSTILE}:missing"}, "has no function missing"),
        (
            {"overlong": OverlongConfig(soft_punishment=True, cache_tokens=101)},
            r"rewards\.overlong\.cache_tokens is 101, above max_response_tokens, 100",
        ),
    ],
)
def test_bad_settings_are_refused_when_made(fields: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        scorer_of(make(RewardConfig, **fields), max_response_tokens=100)


def test_failures_are_logged(caplog: pytest.LogCaptureFixture):
    with hostile("as_told", num_workers=1) as python, caplog.at_level(logging.WARNING):
        python.score([rollout("raise"), rollout("42")])
    assert "no verdict for 1 of 2 responses" in caplog.text
    assert "KeyError" in caplog.text


def test_only_the_end_of_a_huge_response_is_read():
    with scorer("regex", pattern=DIGIT) as regex:
        verdicts = regex.score([rollout("7" * 3_000_000 + " 42"), rollout("42" + " " * 3_000_000)])
    assert [v.is_correct for v in verdicts] == [True, False]
