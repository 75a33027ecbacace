"""Kept rollouts come back bit for bit, and only where they belong."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from tests.judged import judged_batch
from tests.rollout_fixtures import make_episodes, make_rollouts
from tests.rollouts.test_dynamic_sampling import collection
from vapo.environments.contract import Verdict
from vapo.networks.weights_lineage import Lineage
from vapo.rollouts.kept_rollouts import IterationRollouts, Origin, ResumeCache, max_cache_bytes
from vapo.rollouts.source import RolloutSource
from vapo.runs.run_dirs import RunDir
from vapo.types import FinishReason, IterationStart, Phase, Prompt, PromptScore, Rollout, Turn

ORIGIN = Origin(3, rank=0, world_size=1, identity="abc", weights="123")
PROMPTS = [
    Prompt("file:1", "1+1", (4, 5), "2", metadata={"x": object()}),
    Prompt("file:2", "2+2=", (6,), "4"),
]


def sampled() -> IterationRollouts:
    rollouts = [
        Rollout(PROMPTS[0], (7, 8, 1), "ab\ud800\n", (-0.1, -1e-300, -3.0), FinishReason.STOP),
        Rollout(PROMPTS[1], (9,), "", (-(2**-40),), FinishReason.LENGTH),
    ]
    verdicts = [Verdict(True, 1.0, "2"), Verdict(False, -1.0, None, "timeout")]
    batch = judged_batch(rollouts, verdicts, max_response_tokens=5)
    batch = replace(
        batch,
        loss_mask=batch.loss_mask & torch.tensor([[True], [False]]),
        baseline_rewards=torch.tensor([0.1, float("nan")]),
        step_starts=torch.tensor([[True, False, True], [True, False, False]]),
        step_values=torch.tensor([[0.1, 0.1, 1 / 3], [-0.7, 0.0, 0.0]]),
        sampled_groups=(PromptScore("0f3a", 1, 1), PromptScore("77b0", 0, 1)),
    )
    metrics = {"rollout/x": 0.1 + 0.2, "rollout/y": float("nan")}
    return IterationRollouts(Phase.POLICY_OPTIMIZATION, batch, metrics)


@pytest.fixture
def kept(tmp_path: Path) -> ResumeCache:
    found = ResumeCache(RunDir(tmp_path, "abc"), PROMPTS)
    found.write(ORIGIN, sampled())
    return found


def test_episodes_come_back_with_their_turns_and_failures(tmp_path: Path) -> None:
    rollouts, verdicts = make_episodes(4, vocab_size=30)
    verdicts[1] = replace(verdicts[1], is_correct=False, failure="crash: step")
    batch = judged_batch(rollouts, verdicts, max_response_tokens=32)
    kept = ResumeCache(RunDir(tmp_path, "abc"), [rollout.prompt for rollout in rollouts])
    kept.write(ORIGIN, IterationRollouts(Phase.POLICY_OPTIMIZATION, batch, {}))
    found = kept.read(ORIGIN)
    assert found is not None
    assert found.batch.rollouts == batch.rollouts
    assert found.batch.is_lost.tolist() == [False, True, False, False]


def test_all_of_it_comes_back(kept: ResumeCache) -> None:
    found, expected = kept.read(ORIGIN), sampled()
    assert found is not None
    assert found.phase is Phase.POLICY_OPTIMIZATION
    assert str(found.metrics) == str(expected.metrics)
    for field in fields(expected.batch):
        ours, theirs = getattr(found.batch, field.name), getattr(expected.batch, field.name)
        if isinstance(theirs, torch.Tensor):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours.nan_to_num(9.0), theirs.nan_to_num(9.0)), field.name
        else:
            assert ours == theirs, field.name


@pytest.mark.parametrize(
    "other",
    [{"iteration": 4}, {"rank": 1}, {"world_size": 2}, {"identity": "abd"}, {"weights": "124"}],
    ids=lambda other: next(iter(other)),
)
def test_of_another_origin_nothing_is_taken(kept: ResumeCache, other: dict[str, Any]) -> None:
    """Even under the file name that would be asked for."""
    origin = replace(ORIGIN, **other)
    source = kept.path(ORIGIN.iteration, ORIGIN.rank)
    target = kept.path(origin.iteration, origin.rank)
    if target != source:
        source.rename(target)
    assert kept.read(origin) is None


def test_the_origin_is_of_the_runs_config_and_weights(kept: ResumeCache) -> None:
    assert kept.origin(3, "other") == replace(ORIGIN, weights="other")


def test_what_sampling_took_the_stopped_process_is_not_the_resumed_ones(
    kept: ResumeCache,
) -> None:
    made, _ = collection("vapo")
    lineage = Lineage()
    source = RolloutSource(made.config, made, lineage, made.progress, kept)
    ahead = sampled()
    ahead.metrics["rollout/ahead_s"] = 9.0
    kept.write(kept.origin(3, lineage.weights), ahead)
    start = IterationStart(4, Phase.POLICY_OPTIMIZATION, policy_iterations=3)
    _, metrics = source.next_batch(start, last=4)
    assert metrics["rollout/x"] == 0.1 + 0.2
    assert "rollout/ahead_s" not in metrics


def test_a_full_disk_costs_the_kept_rollouts_and_not_the_run(
    kept: ResumeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("vapo.rollouts.kept_rollouts.save_file", is_full)
    made, _ = collection("vapo")
    notes: list[str] = []
    monkeypatch.setattr(made.progress, "note", notes.append)
    source = RolloutSource(made.config, made, Lineage(), made.progress, kept)
    start = IterationStart(4, Phase.POLICY_OPTIMIZATION, policy_iterations=3)
    batch, _ = source.next_batch(start, last=4)
    assert len(batch) > 0
    assert sum("could not be kept: I/O error: No space left" in note for note in notes) == 1
    assert not kept.has(4, 0)
    assert [path.name for path in kept.folder.iterdir()] == [kept.path(3, 0).name]


def test_damaged_or_of_other_data_nothing_is_taken(kept: ResumeCache, tmp_path: Path) -> None:
    path = kept.path(3, 0)
    original = path.read_bytes()
    for place in range(0, len(original), 37):
        flipped = bytearray(original)
        flipped[place] ^= 4
        path.write_bytes(flipped)
        assert kept.read(ORIGIN) is None, place
        path.write_bytes(original[:place])
        assert kept.read(ORIGIN) is None, place
    path.write_bytes(original)
    assert kept.read(ORIGIN) is not None
    changed = [PROMPTS[0], replace(PROMPTS[1], prompt_ids=(6, 6))]
    assert ResumeCache(RunDir(tmp_path, "abc"), changed).read(ORIGIN) is None
    assert ResumeCache(RunDir(tmp_path, "abc"), PROMPTS[:1]).read(ORIGIN) is None


def test_only_what_is_finished_is_forgotten(kept: ResumeCache) -> None:
    other = replace(ORIGIN, iteration=4, rank=1)
    kept.write(other, sampled())
    kept.forget(first_kept=4)
    assert not kept.has(3, 0)
    assert kept.has(4, 1)


@pytest.mark.parametrize("length", [1, 300])
def test_what_full_responses_take_is_known_beforehand(tmp_path: Path, length: int) -> None:
    made, verdicts = make_rollouts(64, vocab_size=30, max_response=1)
    full = [
        replace(
            rollout,
            response_ids=(7,) * length,
            response_text="word" * length,
            rollout_logprobs=(-0.1,) * length,
            turns=(Turn(0, length),),
        )
        for rollout in made
    ]
    batch = judged_batch(full, verdicts, max_response_tokens=length)
    tokens = torch.zeros(64, length)  # of algorithms that continue prefixes
    batch = replace(batch, step_starts=tokens.bool(), step_values=tokens)
    kept = ResumeCache(RunDir(tmp_path, "abc"), [rollout.prompt for rollout in full])
    kept.write(ORIGIN, IterationRollouts(Phase.POLICY_OPTIMIZATION, batch, {}))
    most = max_cache_bytes(64, length)
    assert most * 0.6 < kept.path(3, 0).stat().st_size <= most
