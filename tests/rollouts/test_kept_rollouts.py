"""Kept rollouts come back bit for bit, and only where they belong."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from tests.judged import judged
from tests.rollout_fixtures import make_episodes, make_rollouts
from tests.rollouts.test_dynamic_sampling import collection
from tests.systems import system_config
from tests.tiny_model import tiny_tokenizer
from vapo.environments.contract import Verdict
from vapo.files.whole_files import sha256
from vapo.functional.columns import with_loss_on
from vapo.networks.weights_lineage import Lineage
from vapo.rollouts.batch import configured_batch
from vapo.rollouts.kept_rollouts import IterationRollouts, Origin, ResumeCache, max_cache_bytes
from vapo.rollouts.rollout_file import read_table, write_table
from vapo.rollouts.source import RolloutSource
from vapo.runs.run_dirs import RunDir
from vapo.studies.inspection.reading import ResponseReader
from vapo.studies.inspection.responses import InspectedResponse
from vapo.types import (
    FinishReason,
    IterationStart,
    Phase,
    Prompt,
    PromptScore,
    Rollout,
    Turn,
    VerifierVerdict,
)

CONFIG = system_config("vapo")
ORIGIN = Origin(3, rank=0, world_size=1, identity="abc", weights="123")
PROMPTS = [
    Prompt("file:1", "1+1", (4, 5), "2", metadata={"x": object()}),
    Prompt("file:2", "2+2=", (6,), "4"),
]


def sampled() -> IterationRollouts:
    rollouts = [
        Rollout(PROMPTS[0], (7, 8, 1), "ab?\n", (-0.125, -(2.0**-140), -3.0), FinishReason.STOP),
        Rollout(PROMPTS[1], (9,), "", (-(2**-40),), FinishReason.LENGTH),
    ]
    by_verifier = {
        "math": VerifierVerdict(is_correct=True, reward=0.1, extracted="2", failure=None)
    }
    verdicts = [Verdict(True, 1.0, "2", by_verifier=by_verifier)]
    verdicts += [Verdict(False, -1.0, None, "timeout")]
    rollouts = judged(rollouts, verdicts)
    turn = replace(rollouts[0].turns[0], version=3, updates=((0, 2), (1, 1)))
    rollouts[0] = replace(rollouts[0], turns=(turn,))
    batch = with_loss_on(
        configured_batch(rollouts, CONFIG, group_size=1), torch.tensor([True, False])
    )
    batch = replace(
        batch,
        baseline_rewards=torch.tensor([0.1, float("nan")]),
        step_starts=torch.tensor([[True, False, True], [True, False, False]]),
        step_values=torch.tensor([[0.1, 0.1, 1 / 3], [-0.7, 0.0, 0.0]]),
        sampled_groups=(PromptScore("0f3a", 1, 1), PromptScore("77b0", 0, 1)),
    )
    metrics = {"rollout/x": 0.1 + 0.2, "rollout/y": float("nan")}
    return IterationRollouts(Phase.POLICY_OPTIMIZATION, batch, metrics)


def read(kept: ResumeCache, origin: Origin = ORIGIN) -> IterationRollouts | None:
    return kept.read(origin, CONFIG, tiny_tokenizer())


@pytest.fixture
def kept(tmp_path: Path) -> ResumeCache:
    found = ResumeCache(RunDir(tmp_path, "abc"), PROMPTS)
    found.write(ORIGIN, sampled())
    return found


def test_episodes_come_back_with_their_turns_and_failures(tmp_path: Path) -> None:
    rollouts, verdicts = make_episodes(4, vocab_size=30)
    verdicts[1] = replace(verdicts[1], is_correct=False, failure="crash: step")
    batch = configured_batch(judged(rollouts, verdicts), CONFIG, group_size=1)
    kept = ResumeCache(RunDir(tmp_path, "abc"), [rollout.prompt for rollout in rollouts])
    kept.write(ORIGIN, IterationRollouts(Phase.POLICY_OPTIMIZATION, batch, {}))
    found = read(kept)
    assert found is not None
    for ours, theirs in zip(found.batch.rollouts, batch.rollouts, strict=True):
        exact = tuple(torch.tensor(theirs.rollout_logprobs).tolist())  # float32, as in the batch
        assert ours == replace(theirs, rollout_logprobs=exact)
    assert found.batch.is_lost.tolist() == [False, True, False, False]


def test_all_of_it_comes_back(kept: ResumeCache) -> None:
    found, expected = read(kept), sampled()
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
    for suffix in (".parquet", ".sha256"):
        source = kept.path(ORIGIN.iteration, ORIGIN.rank).with_suffix(suffix)
        source.rename(kept.path(origin.iteration, origin.rank).with_suffix(suffix))
    assert read(kept, origin) is None


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
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.ParquetWriter.write_table", is_full)
    made, _ = collection("vapo")
    notes: list[str] = []
    monkeypatch.setattr(made.progress, "note", notes.append)
    source = RolloutSource(made.config, made, Lineage(), made.progress, kept)
    start = IterationStart(4, Phase.POLICY_OPTIMIZATION, policy_iterations=3)
    batch, _ = source.next_batch(start, last=4)
    assert len(batch) > 0
    assert sum("could not be kept: No space left" in note for note in notes) == 1
    assert not kept.has(4, 0)
    assert {path.name for path in kept.folder.iterdir()} == {
        "iteration_000003_rank_0.parquet",
        "iteration_000003_rank_0.sha256",
    }


def test_damaged_or_of_other_data_nothing_is_taken(kept: ResumeCache, tmp_path: Path) -> None:
    path = kept.path(3, 0)
    original = path.read_bytes()
    for place in range(0, len(original), 37):
        flipped = bytearray(original)
        flipped[place] ^= 4
        path.write_bytes(flipped)
        assert read(kept) is None, place
        path.write_bytes(original[:place])
        assert read(kept) is None, place
    path.write_bytes(original)
    assert read(kept) is not None
    changed = [PROMPTS[0], replace(PROMPTS[1], prompt_ids=(6, 6))]
    assert read(ResumeCache(RunDir(tmp_path, "abc"), changed)) is None
    assert read(ResumeCache(RunDir(tmp_path, "abc"), PROMPTS[:1])) is None


def test_only_what_is_finished_is_forgotten(kept: ResumeCache) -> None:
    other = replace(ORIGIN, iteration=4, rank=1)
    kept.write(other, sampled())
    kept.forget(first_kept=4)
    assert not kept.has(3, 0)
    assert kept.has(4, 1)


@pytest.mark.parametrize("length", [60, 300])
def test_what_full_responses_take_is_known_beforehand(tmp_path: Path, length: int) -> None:
    """Of tokens, texts and numbers that nothing can compress."""
    made, verdicts = make_rollouts(64, vocab_size=30, max_response=1)
    draw = random.Random(0)
    full = [
        replace(
            rollout,
            response_ids=tuple(draw.randrange(2**17) for _ in range(length)),
            response_text="".join(map(chr, draw.choices(range(32, 1000), k=2 * length))),
            rollout_logprobs=tuple(-draw.random() for _ in range(length)),
            turns=(Turn(0, length),),
        )
        for rollout in made
    ]
    batch = configured_batch(judged(full, verdicts), CONFIG, group_size=1)
    tokens = torch.rand(64, length)  # of algorithms that continue prefixes
    batch = replace(batch, step_starts=tokens < 0.1, step_values=tokens)
    kept = ResumeCache(RunDir(tmp_path, "abc"), [rollout.prompt for rollout in full])
    kept.write(ORIGIN, IterationRollouts(Phase.POLICY_OPTIMIZATION, batch, {}))
    most = max_cache_bytes(64, length)
    assert most * 0.6 < kept.path(3, 0).stat().st_size <= most


def altered(kept: ResumeCache, **columns: Any) -> None:
    """Change columns of all rows, with a digest that fits: as a received folder may have."""
    path = kept.path(3, 0)
    table, metadata = read_table(path, key="x")
    rows = [row | columns for row in table.to_pylist()]
    write_table(path, pa.Table.from_pylist(rows, table.schema), metadata)
    path.with_suffix(".sha256").write_text(sha256(path))


@pytest.mark.parametrize(
    "columns",
    [
        {"response_ids": [7, 8, 10**6]},
        {"response_ids": [7, 8]},
        {"rollout_logprobs": [0.0]},
        {"reward": float("nan")},
        {"is_filler": None},
        {"step_values": [0.5]},
        {"versions": [1, 2]},
        {"by_verifier": '{"math": 1}'},
        {"by_verifier": '{"math": {"reward": NaN}}'},
        {"updates": [[[1]]]},
        {"prompt": "1+3"},
        {"finish_reason": "why"},
    ],
    ids=lambda columns: "-".join(columns),
)
def test_of_a_received_file_only_what_fits_is_taken(
    kept: ResumeCache, columns: dict[str, Any]
) -> None:
    altered(kept)
    assert read(kept) is not None
    altered(kept, **columns)
    assert read(kept) is None


def test_another_program_reads_what_is_kept(kept: ResumeCache) -> None:
    (first, second) = ResponseReader(kept.path(3, 0))
    assert isinstance(first, InspectedResponse)
    assert isinstance(second, InspectedResponse)
    assert (first.prompt, first.response, first.reward) == ("1+1", "ab?\n", 1.0)
    assert (first.response_ids, second.is_truncated) == ((7, 8, 1), True)


def test_an_earlier_versions_file_is_named_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ResumeCache(RunDir(tmp_path, "abc"), PROMPTS)
    kept.folder.mkdir()
    old = kept.folder / "iteration_000003_rank_0.safetensors"
    old.write_text("")
    made, _ = collection("vapo")
    notes: list[str] = []
    monkeypatch.setattr(made.progress, "note", notes.append)
    source = RolloutSource(made.config, made, Lineage(), made.progress, kept)
    start = IterationStart(4, Phase.POLICY_OPTIMIZATION, policy_iterations=3)
    source.next_batch(start, last=4)
    assert notes[0] == (
        "the kept rollouts were sampled with other weights, data or config, are damaged, or an "
        "earlier vapo saved them: the iteration's rollouts are sampled again"
    )
    kept.forget(first_kept=4)
    assert not list(kept.folder.iterdir())
