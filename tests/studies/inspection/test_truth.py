"""The truth about others' responses: what is asked for, and continuations by a real policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.fits import ROOT
from tests.networks.chat_tokenizers import ids_of
from tests.studies.inspection import made_up
from vapo.config.values import PatternSegments, TokenSegments
from vapo.errors import UserError
from vapo.networks.loading import load_tokenizer
from vapo.studies.inspection.findings import collect_findings
from vapo.studies.inspection.reading import ResponseReader
from vapo.studies.inspection.report import inspect_responses
from vapo.studies.inspection.truth import _rollout
from vapo.studies.inspection.truth_request import TruthRequest, verifier_overrides

POLICY = str(ROOT / "models/checked_steps/policy")
ROWS = Path(__file__).with_name("fixtures") / "checked_steps.jsonl"


@pytest.mark.parametrize(
    ("policy", "verifier", "num", "said"),
    [
        (None, "math", 4, "--value_truth needs --policy"),
        (POLICY, None, 4, "--value_truth needs --verifier"),
        (POLICY, "math", 1, "2 continuations or more"),
    ],
)
def test_what_is_missing_is_said(
    policy: str | None, verifier: str | None, num: int, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        TruthRequest(policy, num, verifier)


def test_verifiers_by_their_names() -> None:
    assert verifier_overrides("math") == ["verifier=math"]
    assert verifier_overrides("own.py:judge") == ["verifier=python", "function=own.py:judge"]
    assert verifier_overrides("regex:it's (.*)") == ["verifier=regex", "pattern='it''s (.*)'"]


def test_the_config_has_the_file_s_rewards_lengths_and_steps() -> None:
    request = TruthRequest(POLICY, 4, r"regex:;(\d)$", overrides=["rollouts.temperature=0.5"])
    responses = [replace(r, reward=(r.reward + 1) * 5) for r in made_up.sound(8)]
    config = request.config(collect_findings(responses))
    assert (config.rewards.correct, config.rewards.incorrect) == (10.0, 0.0)
    assert config.rollouts.max_response_tokens == 10
    assert config.rollouts.temperature == 0.5
    assert isinstance(config.value_truth.segments, TokenSegments)
    own = replace(request, overrides=["value_truth.segments={kind: pattern, pattern: '[+-]'}"])
    segments = own.config(collect_findings(responses)).value_truth.segments
    assert isinstance(segments, PatternSegments)
    assert segments.pattern == "[+-]"
    lines = [replace(r, response="a\nb\n\nc\nd") for r in responses]
    assert isinstance(request.config(collect_findings(lines)).value_truth.segments, PatternSegments)


@pytest.mark.parametrize("keeps_special", [True, False])
def test_a_verifier_reads_special_tokens_as_the_rewards_key_says(keeps_special: bool) -> None:
    tokenizer = load_tokenizer(POLICY)
    findings = collect_findings(made_up.sound(4))
    start, end = ids_of("a", tokenizer)[0], tokenizer.eos_token_id
    response = replace(findings.responses[0], response_ids=(start, end, start, end), logprobs=None)
    rollout = _rollout(response, findings, tokenizer, {end}, keeps_special=keeps_special)
    assert rollout.response_text == (f"a{tokenizer.eos_token}a" if keeps_special else "aa")


def test_without_ids_nothing_can_be_continued() -> None:
    with pytest.raises(UserError, match="no response can be continued"):
        inspect_responses(made_up.sound(4), name="made up", truth=TruthRequest(POLICY, 2, "exact"))


@pytest.mark.slow
def test_continuations_beside_the_critic_s_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    request = TruthRequest(POLICY, 8, r"regex:;(\d)$", num_responses=8)
    found = inspect_responses(ResponseReader(ROWS), name="rows", truth=request)
    truth = found.truth
    assert truth is not None
    assert truth.agreement == 1
    figures = truth.truth.figures
    assert figures.num_responses == 8
    assert figures.num_continuations == 8
    assert figures.explained.value > 0.2
    assert figures.mse.value < figures.baseline_mse.value
    by_row = {point.row for point in truth.truth.points}
    for point in truth.truth.points:
        response = found.findings.responses[point.row]
        assert response.values is not None
        assert point.value == response.values[point.num_tokens]
        assert set(point.returns) <= {1.0, -1.0}
    assert len(by_row) == 8
    assert "values against the truth" in found.text()
    assert "What the critic knows" in found.page()
    assert found.summary()["truth"]["figures"]["explained"][0] == figures.explained.value
