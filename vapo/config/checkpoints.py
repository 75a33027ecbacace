"""What a run keeps so that it can resume, and which configs are the same run's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vapo.config.kinds import is_function_folder, option
from vapo.config.sources import is_under, values_hash


@dataclass
class CheckpointConfig:
    """Options of a run's checkpoints and of resuming from them (docs/resuming.md)."""

    every_n_iterations: int = option(1, "how often last.ckpt is written", ge=1)
    resume: Literal["never", "auto"] = option(
        "never",
        "auto: resume the newest unfinished run of this config in output_dir, or start one if "
        "there is none; --ckpt_path wins over it",
    )
    keep: int | None = option(
        None,
        "this many of the newest are kept, and the best: if one is damaged, the next is taken; "
        "null: 2, or 1 where each is above 1 GiB, as from 100 M trained parameters on",
        ge=1,
    )
    keep_rollouts: bool = option(
        True,
        "keep an iteration's rollouts on disk until its checkpoint is written, so that a stopped "
        "run does not sample them again",
    )
    save_in_background: bool | None = option(
        None,
        "write a checkpoint while the next iteration runs; training waits only for a copy in host "
        "memory, of the checkpoint's size; null: true on a GPU where the copy takes at most half "
        "of the memory that the host has free at the start",
    )
    stop_grace_s: float = option(
        20.0,
        "from a stop signal to the exit at the latest, whatever the run does then; below the "
        "scheduler's own (SLURM's KillWait: 30)",
        gt=0,
    )


# Keys that may change between two sessions of one run: where it runs, what it keeps and reports.
FREE_KEYS = (
    *("output_dir", "tracking", "checkpoints", "watch", "value_pages", "value_truth"),
    *("rollouts.vllm", "rollouts.servers", "trainer.accelerator", "trainer.devices"),
    *("trainer.num_nodes", "trainer.num_threads", "trainer.sharded_checkpoints"),
    *("trainer.profile", "trainer.peak_tflops"),
)


def identity_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that decide which run a config is, by dotted key.

    `values` is the flattened config. The keys that may change between two sessions of a run
    (`FREE_KEYS`) and the folders of functions are left out. Keys of older versions have their new
    names.
    """
    free = (*FREE_KEYS, "trainer.checkpoint_every_n_iterations")  # the last is of older runs
    new_names = {"algorithm.value_clip": "critic.value_clip"}  # of older runs, too
    decide = (key for key in values if not is_function_folder(key) and not is_under(key, free))
    return {new_names.get(key, key): values[key] for key in decide}


def config_identity(values: Mapping[str, Any]) -> str:
    """Return a digest (12 hex digits) of a flattened config; equal digests can resume one run.

    The keys that may change between two sessions of a run (`FREE_KEYS`) do not count. A sweep's
    `task_identity` is stricter: there the code and the models must be the same too.
    """
    return values_hash(identity_values(values))
