"""The order of the run's callbacks, which do something for each other at an iteration's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from lightning.pytorch.callbacks import Callback

from tests.systems import system_config
from tests.tiny_model import tiny_tokenizer
from vapo.rollouts.kept_rollouts import ResumeCache
from vapo.runs.run_dirs import RunDir
from vapo.runs.stopping import Stopping
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.training.callbacks.diagnostics import DiagnosticTables, ValuePages
from vapo.training.module import VapoModule
from vapo.training.observers import ValueTruths
from vapo.training.parts import assemble_parts
from vapo.training.trainer import RunCallbacks


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("ValuePretraining", "WeightSync", "the phase decides whether weights are pushed"),
        ("ValuePretraining", "ValuePages", "the last iteration of a phase gets a page"),
        ("ValuePretraining", "DiagnosticTables", "and a table by position"),
        ("WeightSync", "Evaluation", "the score is of the new weights, on an engine that is free"),
        ("PromptScores", "Evaluation", "the file is there before the first evaluation"),
        ("Evaluation", "Recording", "the time of the evaluation is among the iteration's"),
        ("ValuePages", "Recording", "and so is that of a page"),
        ("ValuePretraining", "Recording", "the held-out figure of a pass is logged"),
        ("ValuePretraining", "CriticKnowledge", "and is in the run's summary"),
        ("Recording", "Watch", "a run that stops itself has its metrics"),
        ("Watch", "Checkpointing", "and keeps the checkpoint from before"),
        ("Checkpointing", "Profiling", "a trace has the whole iteration"),
    ],
)
def test_what_must_come_before_what(first: str, second: str, reason: str, tmp_path: Path) -> None:
    callbacks = run_callbacks(tmp_path, "trainer.profile=true")
    names = [type(callback).__name__ for callback in callbacks.in_order]
    assert names.index(first) < names.index(second), reason


def run_callbacks(folder: Path, *overrides: str, kept: Any = None) -> RunCallbacks:
    parts = assemble_parts(
        VapoModule(system_config("vapo", *overrides), pad_id=0),
        MagicMock(),
        progress=Progress(enabled=False),
        critic_dir=folder / "critic",
    )
    return RunCallbacks(
        parts,
        RunDir(folder),
        MagicMock(spec=RunLogger, is_resumed=False),
        Progress(enabled=False),
        tiny_tokenizer(),
        Stopping(1.0),
        kept,
    )


def test_the_users_own_come_last_before_the_checkpoint_that_has_their_states(
    tmp_path: Path,
) -> None:
    own, callbacks = Callback(), run_callbacks(tmp_path)
    callbacks.add([])
    assert "OwnStates" not in [type(callback).__name__ for callback in callbacks.in_order]
    callbacks.add([own])
    assert callbacks.in_order[-3] is own
    assert [type(callback).__name__ for callback in callbacks.in_order[-2:]] == [
        *("OwnStates", "Checkpointing")
    ]


def test_what_looks_and_what_saves_get_what_they_need(tmp_path: Path) -> None:
    kept = ResumeCache.__new__(ResumeCache)
    truth = ("value_truth.every_n_iterations=1", "value_truth.num_prefixes=1")
    callbacks = run_callbacks(tmp_path, *truth, kept=kept)
    assert callbacks.checkpointing.rollout_cache is kept
    assert callbacks.checkpointing.score == callbacks.evaluation.score_of
    callbacks.watch.faults.skipped("critic", "step 1", "nan")
    callbacks.watch.faults.pop_metrics()
    assert callbacks.checkpointing.reason_not_to_save() == "the critic's latest update was skipped"
    readers = [c for c in callbacks.in_order if isinstance(c, (DiagnosticTables, ValuePages))]
    assert len(readers) == 2
    assert {type(reader.truths) for reader in readers} == {ValueTruths}
