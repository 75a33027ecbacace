"""The verifier of the package math-verify: its adapter, on a stand-in for the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rewards.rollouts_for_tests import rollout, scorer
from vapo.config import FitConfig
from vapo.config.critic_rules import gives_configured_rewards
from vapo.config.loading import load_config
from vapo.errors import UserError
from vapo.rewards.verifiers import make_math_verify

STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STAND_INS))


def test_missing_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        make_math_verify()
    said = str(error.value)
    assert said.startswith("rewards.verifier is math_verify, which is not installed: pip install")
    assert "math-verify" in said


def test_a_scorer_without_the_package_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="math_verify, which is not installed"):
        scorer("math_verify")


@pytest.mark.usefixtures("stand_in")
def test_reference_and_response_are_parsed_and_compared():
    verifier = make_math_verify()
    right = verifier(r"so \boxed{42}", "42", {})
    assert (right.is_correct, right.extracted, right.reward) == (True, "42", None)
    assert not verifier(r"so \boxed{41}", "42", {}).is_correct
    assert verifier(r"so \boxed{42}", r"it is \boxed{42}", {}).is_correct
    nothing = verifier("no box", "42", {})
    assert (nothing.is_correct, nothing.extracted) == (False, None)


@pytest.mark.usefixtures("stand_in")
def test_what_hangs_or_attacks_costs_its_own_verdict_alone():
    texts = [r"\boxed{42}", "hang", "open a file", "evaluate", r"\boxed{41}", r"\boxed{42}"]
    with scorer("math_verify", num_workers=1, timeout_s=0.5) as judge:
        verdicts = judge.score([rollout(text) for text in texts])
        assert judge.extracts_answers()
    assert [v.is_correct for v in verdicts] == [True, False, False, False, False, True]
    failures = [v.failure or "" for v in verdicts]
    assert [f.partition(":")[0] for f in failures] == ["", "timeout", "error", "error", "", ""]
    assert "UnsafeTextError" in failures[2]
    assert "UnsafeTextError" in failures[3]


@pytest.mark.usefixtures("stand_in")
def test_it_is_chosen_in_a_config():
    config = load_config(FitConfig, [Path("conf/vapo.yaml")], ["rewards.verifier=math_verify"])
    assert config.rewards.verifier == "math_verify"
    assert not hasattr(config.rewards, "percent")
    assert gives_configured_rewards(config)
