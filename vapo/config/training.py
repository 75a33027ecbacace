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
        "prompt + response tokens of one forward / backward; padded ones count padding, shared "
        "prompts count once",
        ge=1,
    )
    packing: Literal["auto", "padded", "packed", "shared_prompts"] = option(
        "auto",
        "padded: sequences of similar length side by side, padded; packed: one after another in "
        "one row, attention confined to each; shared_prompts: packed, and the prompt of several "
        "responses is computed once for all of them; auto: the last of these that all networks "
        "can read",
    )
    max_staleness: int = option(
        0,
        "how many policy iterations older than the actor the weights may be that sampled a "
        "rollout; 0: sampling and training take turns; above, a thread samples the iterations to "
        "come while this one trains: docs/rollouts.md, algorithm.mismatch",
        ge=0,
    )
    update_open_rollouts: bool = option(
        True,
        "with max_staleness above 0: new weights go to the engine at once, and rollouts under way "
        "go on with them; false: those are waited for, so that a batch has one policy and a run "
        "repeated is the same (with an environment up to rounding)",
    )
