"""The package math-verify itself, on the reference sets: what it calls right and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rewards.adversarial import cases
from tests.rewards.rollouts_for_tests import rollout, scorer
from tests.rewards.test_reference_answers import MODEL_ROWS, ROWS

pytest.importorskip("math_verify", reason="needs the extra math_verify: make math-verify-test")


def test_it_calls_most_right_answers_right_and_many_wrong_ones_too():
    """The page's counts; another version of the package may have others."""
    rows = [*ROWS, *MODEL_ROWS]
    with scorer("math_verify", num_workers=2) as judge:
        verdicts = judge.score([rollout(r["response"], r["reference"]) for r in rows])
    called = [(r["verdict"] == "wrong", v.is_correct) for r, v in zip(rows, verdicts, strict=True)]
    assert called.count((False, True)) > 2 * called.count((False, False))
    assert called.count((True, True)) > 20  # why `math` is the default


def test_ordinary_answers_and_attacks():
    texts = [r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{0.4}", "", "9**9**9**9",
             "__import__('os').abort()"]  # fmt: skip
    with scorer("math_verify", num_workers=1) as judge:
        verdicts = judge.score([rollout(text, "0.5") for text in texts])
    assert [v.is_correct for v in verdicts] == [True, True, False, False, False, False]


def test_attacks_run_no_code_and_cost_their_own_verdict_alone(tmp_path: Path):
    tried = [case for case in cases(84, 1, tmp_path / "canary") if len(case.text) < 5_000]
    with scorer("math_verify", num_workers=2, timeout_s=1.0) as judge:
        verdicts = judge.score([rollout(case.text, case.answer) for case in tried])
        last = judge.score([rollout(r"\boxed{42}")])
    assert len(verdicts) == len(tried)
    assert {v.failure for v in verdicts} <= {None, "timeout"}
    assert last[0].is_correct
    assert not (tmp_path / "canary").exists()
