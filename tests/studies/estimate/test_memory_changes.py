"""The changes that let a config fit, found with memory that is the sum of what each key takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import fit_config
from vapo.config import FitConfig
from vapo.studies.estimate.memory_changes import (
    FittingChanges,
    changes_phrase,
    changes_text,
    changes_that_fit,
)
from vapo.system.host_memory import GIB


@pytest.fixture
def config(tmp_path: Path) -> FitConfig:
    return fit_config(
        tmp_path, "actor.lora.rank=8", "critic.kind=probe", "trainer.accelerator=gpu",
        "actor.gradient_checkpointing=true", "critic.gradient_checkpointing=true",
        "rollouts.max_concurrent_sequences=256", "rollouts.max_response_tokens=1000",
    )  # fmt: skip


def peak(config: FitConfig) -> float:
    """40 GiB of weights in float32 and 20 in half; an eighth of a GiB for each sequence of 1000
    tokens. Offload and further GPUs change nothing."""
    weights = 20 if config.actor.dtype == "bfloat16" else 40
    length = config.rollouts.max_response_tokens / 1000
    return (weights + config.rollouts.max_concurrent_sequences * length / 8) * GIB


def found(config: FitConfig, gib: float) -> list[list[tuple[str, float]]]:
    return [
        [
            (" ".join(change.overrides), peak / GIB)
            for change, peak in zip(way.changes, way.peaks, strict=True)
        ]
        for way in changes_that_fit(config, gib * GIB, peak)
    ]


def test_each_change_that_is_enough_alone_is_named_in_its_mildest_form(config: FitConfig) -> None:
    assert peak(config) == 72 * GIB
    assert found(config, 60) == [
        [("rollouts.max_concurrent_sequences=64", 48)],
        [("actor.dtype=bfloat16", 52)],
        [("rollouts.max_response_tokens=500", 56)],
    ]
    assert found(config, 45) == [[("rollouts.max_concurrent_sequences=16", 42)]]


def test_changes_are_added_until_they_fit_and_those_that_are_not_needed_left_out(
    config: FitConfig,
) -> None:
    """Micro-batches of fewer tokens come first and change nothing; 64 sequences are enough, so
    that they are not cut to 16."""
    assert found(config, 30) == [
        [("rollouts.max_concurrent_sequences=64", 48), ("actor.dtype=bfloat16", 28)]
    ]
    assert found(config, 21.5) == [
        [
            ("rollouts.max_concurrent_sequences=16", 42),
            ("actor.dtype=bfloat16", 22),
            ("rollouts.max_response_tokens=500", 21),
        ]
    ]
    assert found(config, 20) == []


def test_weights_are_halved_beside_adapters_alone(tmp_path: Path) -> None:
    """Weights that are themselves trained would lose the small steps of an update."""
    whole = fit_config(
        tmp_path, "rollouts.max_concurrent_sequences=16", "critic.kind=probe",
        "rollouts.max_response_tokens=1000",
    )  # fmt: skip
    assert found(whole, 23) == [
        [("actor.lora.rank=32 actor.optimizer.lr=1e-05", 42), ("actor.dtype=bfloat16", 22)]
    ]


def test_the_text_has_figures_and_costs(config: FitConfig) -> None:
    text = changes_text(changes_that_fit(config, 30 * GIB, peak))
    assert text.splitlines() == [
        "these changes together let it fit (the peak is that after each of them):",
        "  rollouts.max_concurrent_sequences=64   48.0 GiB  slower sampling",
        "  actor.dtype=bfloat16                   28.0 GiB  the frozen weights are rounded",
    ]
    assert changes_text(changes_that_fit(config, 45 * GIB, peak)).splitlines() == [
        "this change alone lets it fit:",
        "  rollouts.max_concurrent_sequences=16   42.0 GiB  slower sampling",
    ]
    assert changes_text(changes_that_fit(config, 60 * GIB, peak)).startswith(
        "each of these changes alone lets it fit:\n  rollouts.max_concurrent_sequences=64"
    )
    assert "none of the changes of docs/recipes.md" in changes_text([])


def test_the_phrase_has_the_last_peak_of_each_way(config: FitConfig) -> None:
    assert changes_phrase(changes_that_fit(config, 30 * GIB, peak)) == (
        "what would fit is rollouts.max_concurrent_sequences=64 actor.dtype=bfloat16 (28.0 GiB)"
    )
    ways = changes_that_fit(config, 55 * GIB, peak)
    assert changes_phrase(ways) == (
        "what would fit is rollouts.max_concurrent_sequences=64 (48.0 GiB) or "
        "actor.dtype=bfloat16 (52.0 GiB)"
    )
    empty: list[FittingChanges] = []
    assert changes_phrase(empty).startswith("docs/recipes.md")


def test_more_gpus_stand_beside_what_fits_on_as_many(config: FitConfig) -> None:
    def shared_peak(changed: FitConfig) -> float:
        return peak(changed) / changed.trainer.devices

    ways = changes_that_fit(config, 30 * GIB, shared_peak)
    assert changes_text(ways).splitlines() == [
        "these changes together let it fit (the peak is that after each of them):",
        "  rollouts.max_concurrent_sequences=64   48.0 GiB  slower sampling",
        "  actor.dtype=bfloat16                   28.0 GiB  the frozen weights are rounded",
        "this change alone lets it fit:",
        "  trainer.strategy=fsdp trainer.devices=4   18.0 GiB  more GPUs",
    ]
    assert changes_phrase(ways).endswith(
        "(28.0 GiB) or trainer.strategy=fsdp trainer.devices=4 (18.0 GiB)"
    )
