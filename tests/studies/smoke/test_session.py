"""The memory that a session of a smoke test sees, and a session of a real run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integration.commands import SHORTEST, fit
from vapo.studies.smoke.forecast import RunPart, Session, session_file
from vapo.studies.smoke.session import MemoryWatch
from vapo.system.progress import Progress

MIB = 2**20


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> MemoryWatch:
    """A watch that looks only when it is told to."""
    monkeypatch.setattr(MemoryWatch, "_watch", lambda self: None)
    return MemoryWatch()


def test_peaks_are_those_of_the_stage_that_runs(watch: MemoryWatch) -> None:
    progress, part = Progress(enabled=False), RunPart("policy_optimization")
    watch.begin_part(part, progress)
    watch.look()
    with progress.stage("rollout"), progress.stage("inner"):
        blob = b"x" * (200 * MIB)
        watch.look()
    del blob
    with progress.stage("training"):
        watch.look()
    assert set(part.host) == {"other", "rollout", "training"}
    assert part.host["rollout"] - part.host["training"] > 190 * MIB
    before = part.host["rollout"]
    with progress.stage("rollout"):
        watch.look()
    assert part.host["rollout"] == before  # the peak, not the latest
    assert part.gpu == {}


def test_the_gpu_is_looked_at_but_not_while_an_engine_starts(
    watch: MemoryWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    watch.device = torch.device("cuda", 0)
    progress = Progress(enabled=False)
    watch.begin_part(RunPart("start"), progress)
    for stage in ("engine_start", "rollout"):
        with progress.stage(stage):
            watch.look()
    assert watch.part.gpu == {"rollout": 70}
    assert watch.gpu_bytes == 100


def test_processes_that_the_run_has_started_count(watch: MemoryWatch) -> None:
    child: Any = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=5_000 * 2**30))
    watch._process = SimpleNamespace(  # type: ignore[assignment]
        children=lambda recursive: [child], memory_info=lambda: SimpleNamespace(rss=2**30)
    )
    watch.look()
    assert watch.part.host == {"other": 5_001 * 2**30}


def test_a_session_of_a_run_ends_after_its_iteration_and_is_resumed(tmp_path: Path) -> None:
    """SHORTEST has one iteration of value pretraining and two of the policy, 16 responses each, and
    is evaluated on four prompts."""
    more = ["training.num_iterations=5", "checkpoints.every_n_iterations=2"]
    run = fit_session(tmp_path, 2, *more)
    session = Session.of(json.loads(session_file(tmp_path, 2).read_text()))
    assert [part.name for part in session.parts] == [
        "start",
        "value_pretraining",
        "policy_optimization",
    ]
    start, pretraining, policy = (part.seconds for part in session.parts)
    assert {"loading", "evaluation"} < set(start)
    assert {"rollout", "logprobs_values", "training"} < set(pretraining)
    assert set(policy) - set(pretraining) >= {"checkpoint"}
    assert "evaluation" not in policy
    assert session.parts[2].host
    assert (session.num_evaluated, session.num_kept, session.gpu_bytes) == (4, 2, None)
    (checkpoint,) = (path for path in (run / "checkpoints").iterdir() if not path.is_symlink())
    assert checkpoint.name == "iteration_000002"
    assert session.checkpoint_bytes == sum(p.stat().st_size for p in checkpoint.iterdir())
    assert session.critic_bytes > 0
    fit_session(tmp_path, 3, *more, "--ckpt_path", str(checkpoint))
    resumed = Session.of(json.loads(session_file(tmp_path, 3).read_text()))
    assert [part.name for part in resumed.parts] == ["start", "policy_optimization"]
    assert "evaluation" not in resumed.parts[0].seconds


def fit_session(folder: Path, last: int, *overrides: str) -> Path:
    fit(folder, "--smoke_until", str(last), *overrides, small=SHORTEST)
    (run,) = (folder / "runs").glob("*_*")
    return run
