"""The order of the run's callbacks, which do something for each other at an iteration's end."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from tests.systems import system_config
from tests.tiny_model import tiny_tokenizer
from vapo.runs.run_dirs import RunDir
from vapo.runs.stopping import Stopping
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.training.module import VapoModule
from vapo.training.parts import training_parts
from vapo.training.trainer import RunCallbacks


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("ValuePretraining", "WeightSync", "the phase decides whether weights are pushed"),
        ("ValuePretraining", "ValuePages", "the last iteration of a phase gets a page"),
        ("ValuePretraining", "DiagnosticTables", "and a table by position"),
        ("WeightSync", "Evaluation", "the score is of the new weights, on an engine that is free"),
        ("Evaluation", "Recording", "the time of the evaluation is among the iteration's"),
        ("ValuePages", "Recording", "and so is that of a page"),
        ("Recording", "Watch", "a run that stops itself has its metrics"),
        ("Watch", "Checkpointing", "and keeps the checkpoint from before"),
        ("Checkpointing", "Profiling", "a trace has the whole iteration"),
    ],
)
def test_what_must_come_before_what(first: str, second: str, reason: str, tmp_path: Path) -> None:
    config = system_config("vapo", "trainer.profile=true")
    parts = training_parts(
        VapoModule(config, pad_id=0),
        MagicMock(),
        progress=Progress(enabled=False),
        critic_dir=tmp_path / "critic",
    )
    callbacks = RunCallbacks(
        parts,
        RunDir(tmp_path),
        MagicMock(spec=RunLogger, is_resumed=False),
        Progress(enabled=False),
        tiny_tokenizer(),
        Stopping(1.0),
    )
    names = [type(callback).__name__ for callback in callbacks.in_order]
    assert names.index(first) < names.index(second), reason
