"""Rules between the keys of `algorithm.mismatch` and the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import fit_config
from tests.config.test_validation import CRITIC_FREE as NO_CRITIC
from tests.config.test_validation import problem
from vapo.config.hyperparameters import mismatch_of

RAFT = (
    "algorithm.surrogate=logprob",
    "algorithm.advantage_estimator=correct_only",
    "components.clip_higher.enabled=false",
    *NO_CRITIC,
)


def test_it_is_off_by_default(tmp_path: Path) -> None:
    correction = fit_config(tmp_path).algorithm.mismatch
    assert correction.tis_cap is None
    assert not correction.masks


def test_a_level_without_a_cap_is_not_ignored(tmp_path: Path) -> None:
    level = "algorithm.mismatch.tis_level=sequence"
    message = problem(tmp_path, level)
    assert "set algorithm.mismatch.tis_cap" in message
    fit_config(tmp_path, level, "algorithm.mismatch.tis_cap=2")


@pytest.mark.parametrize("key", ["tis_cap=2", "mask_below=0.9", "mask_above=1.1"])
def test_fine_tuning_on_correct_responses_has_nothing_to_correct(tmp_path: Path, key: str) -> None:
    message = problem(tmp_path, *RAFT, f"algorithm.mismatch.{key}")
    assert "corrects a policy gradient" in message
    assert message.endswith(f"set algorithm.mismatch.{key.partition('=')[0]}=null")
    fit_config(tmp_path, *RAFT)
    fit_config(tmp_path, f"algorithm.mismatch.{key}")


def test_icepop_corrects_alone(tmp_path: Path) -> None:
    on = "algorithm.mismatch.icepop=true"
    found = fit_config(tmp_path, on).algorithm.mismatch
    assert (found.icepop_low, found.icepop_high) == (0.5, 5.0)
    message = problem(tmp_path, on, "algorithm.mismatch.tis_cap=2")
    assert "algorithm.mismatch.tis_cap=null, or algorithm.mismatch.icepop=false" in message
    message = problem(tmp_path, *RAFT, on)
    assert message.endswith("set algorithm.mismatch.icepop=false")
    for surrogate in ("dis", "dppo_tv"):
        own = (f"algorithm.surrogate={surrogate}", "components.clip_higher.enabled=false")
        assert "a second time: set algorithm.mismatch.icepop=false" in problem(tmp_path, *own, on)


@pytest.mark.parametrize("bound", ["icepop_low=0.2", "icepop_high=8"])
def test_icepops_band_is_not_ignored(tmp_path: Path, bound: str) -> None:
    message = problem(tmp_path, f"algorithm.mismatch.{bound}")
    assert "has no effect: algorithm.mismatch.icepop is off" in message
    fit_config(tmp_path, f"algorithm.mismatch.{bound}", "algorithm.mismatch.icepop=true")


@pytest.mark.parametrize(
    "key",
    [
        *("tis_cap=0", "mask_below=1", "mask_below=0", "mask_above=1"),
        *("icepop_low=0", "icepop_low=1.1", "icepop_high=0.9"),
    ],
)
def test_ranges(tmp_path: Path, key: str) -> None:
    assert "must be" in problem(tmp_path, f"algorithm.mismatch.{key}")


OVERLAP = "training.max_staleness=1"
SERVERS = (
    "rollouts.engine=vllm_server",
    "rollouts.servers.urls=http://gpu2:8100",
)


@pytest.mark.parametrize(
    "several",
    [("trainer.strategy=fsdp",), ("trainer.strategy=fsdp", "trainer.devices=2")],
)
def test_several_processes_sample_ahead_on_servers(
    tmp_path: Path, several: tuple[str, ...]
) -> None:
    message = problem(tmp_path, OVERLAP, *several)
    assert "gathers their shards" in message
    fit_config(tmp_path, OVERLAP)
    fit_config(tmp_path, *several)
    fit_config(tmp_path, OVERLAP, *SERVERS, *several)


def test_dynamic_sampling_ahead_is_one_processs(tmp_path: Path) -> None:
    dynamic = "algorithm.dynamic_sampling_attempts=3"
    two = ("trainer.strategy=fsdp", "trainer.devices=2")
    message = problem(tmp_path, OVERLAP, *SERVERS, *two, dynamic)
    assert "equally many attempts" in message
    fit_config(tmp_path, OVERLAP, *SERVERS, dynamic)


def test_the_correction_is_on_where_rollouts_are_older(tmp_path: Path) -> None:
    def cap(*overrides: str) -> float | None:
        return mismatch_of(fit_config(tmp_path, *overrides)).tis_cap

    assert cap() is None
    assert cap(OVERLAP) == 2
    assert cap(OVERLAP, "algorithm.mismatch.tis_cap=5") == 5
    assert cap(OVERLAP, "algorithm.mismatch.correct_stale=false") is None
    assert cap(OVERLAP, *RAFT) is None
    assert cap(OVERLAP, "algorithm.mismatch.icepop=true") is None, "which corrects by itself"


def test_overlap_needs_an_engine_beside_the_trainer(tmp_path: Path) -> None:
    message = problem(tmp_path, OVERLAP, "rollouts.engine=vllm")
    assert "set rollouts.engine=vllm_server" in message
    fit_config(tmp_path, OVERLAP, *SERVERS)
    fit_config(tmp_path, "rollouts.engine=vllm")


def test_overlap_without_a_ratio_needs_the_correction(tmp_path: Path) -> None:
    rloo = (
        "algorithm.surrogate=logprob",
        "algorithm.advantage_estimator=leave_one_out",
        "components.clip_higher.enabled=false",
        "training.minibatch_size=null",
        *NO_CRITIC,
    )
    uncorrected = "algorithm.mismatch.correct_stale=false"
    message = problem(tmp_path, OVERLAP, *rloo, uncorrected)
    assert "algorithm.mismatch.tis_cap" in message
    fit_config(tmp_path, OVERLAP, *rloo)
    fit_config(tmp_path, OVERLAP, *rloo, uncorrected, "algorithm.mismatch.tis_cap=2")
    fit_config(tmp_path, OVERLAP, *rloo, uncorrected, "algorithm.mismatch.icepop=true")
    fit_config(tmp_path, OVERLAP, *RAFT)


def test_a_level_is_of_the_cap_that_older_rollouts_turn_on(tmp_path: Path) -> None:
    level = "algorithm.mismatch.tis_level=sequence"
    fit_config(tmp_path, OVERLAP, level)
    off = "algorithm.mismatch.correct_stale=false"
    assert "set algorithm.mismatch.tis_cap" in problem(tmp_path, OVERLAP, level, off)


@pytest.mark.parametrize(
    "key", ["training.update_open_rollouts", "algorithm.mismatch.correct_stale"]
)
def test_switches_of_older_rollouts_are_not_ignored(tmp_path: Path, key: str) -> None:
    message = problem(tmp_path, f"{key}=false")
    assert f"{key} false has no effect: training.max_staleness is 0" in message
    fit_config(tmp_path, OVERLAP, f"{key}=false")
