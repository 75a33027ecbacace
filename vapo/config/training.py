"""How rollouts are trained on: batch sizes, and the layout of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vapo.config.fields import option


@dataclass
class TrainingConfig:
    num_iterations: int = option(
        300, "rollout batches after value pretraining (one iteration each)", ge=0
    )
    minibatch_size: int | None = option(
        512,
        "responses per optimizer step (paper: 512 of 8192, so 16 steps an iteration); null: all "
        "of the rollout batch, so that its one step is on-policy",
        ge=1,
    )
    microbatch_tokens: int = option(
        16384,
        "prompt + response tokens of one forward / backward; padded ones count padding",
        ge=1,
    )
    packing: Literal["auto", "padded", "packed"] = option(
        "auto",
        "padded: sequences of similar length side by side, padded; packed: one after another in "
        "one row, attention confined to each; auto: packed where both networks can read it",
    )
    overlap_rollouts: bool = option(
        False,
        "sample the next iteration's rollouts while this one trains: one update off-policy, see "
        "algorithm.mismatch; needs memory for one more actor, and one process",
    )
