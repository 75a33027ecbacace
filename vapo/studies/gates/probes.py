"""Short trainings that say what a setting can show: a run's beginning, and each network alone.

The module, the stages and the losses are a run's own; there are no checkpoints and no records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch.callbacks import Callback

from vapo.advantages.credit import value_places
from vapo.config import FitConfig
from vapo.functional.metrics import explained_variance
from vapo.rewards.scorer import Scorer
from vapo.studies.short_trainer import train_briefly
from vapo.system.progress import Progress
from vapo.training.callbacks.value_pretraining import evaluated_returns
from vapo.training.minibatches import NETWORKS
from vapo.training.module import VapoModule
from vapo.training.parts import (
    Inputs,
    Sampling,
    module_of,
    num_pretraining_iterations,
    training_parts,
)
from vapo.types import RolloutBatch


@dataclass(frozen=True)
class ProbeSetting:
    """What all probes of a config share."""

    config: FitConfig
    inputs: Inputs
    scorer: Scorer
    progress: Progress


class HeldOutValues(NamedTuple):
    """What a critic knows of held-out rollouts, and its mean value at their middle tokens."""

    explained_variance: float
    middle: float


def heldout_values(module: VapoModule, batch: RolloutBatch) -> HeldOutValues:
    """The critic's values now, against the Monte-Carlo returns; the middle is of what has values,
    sampled tokens or turns."""
    evaluated, returns = evaluated_returns(module, batch)
    values = evaluated.old_values
    assert values is not None
    places = value_places(batch, module.hyperparameters)
    is_middle = places & (places.cumsum(dim=1) - 1 == places.sum(dim=1, keepdim=True) // 2)
    middle = values[is_middle].double().mean()
    found = explained_variance(values, returns, places)
    return HeldOutValues(float(found), float(middle))


def run_probe(
    setting: ProbeSetting,
    watcher: Callback,
    *,
    num_policy_iterations: int,
    trained: Sequence[str] = NETWORKS,
    pretrained_in: Path | None = None,
) -> VapoModule:
    """Train from the config's start for so many policy iterations, or until the watcher stops it.

    Args:
        trained: the networks that the policy phase trains.
        pretrained_in: begin with value pretraining as configured, and save its critic there;
            None: begin with the policy phase.

    Raises:
        UserError: whatever a run's networks, engine and rewards raise.
    """
    own = replace(setting.config.training, num_iterations=num_policy_iterations)
    config = replace(setting.config, training=own)
    module = module_of(config, setting.inputs)
    parts = training_parts(
        module,
        Sampling(config, setting.inputs, setting.scorer, setting.progress),
        progress=setting.progress,
        critic_dir=pretrained_in,
        stored=setting.inputs.stored,
        trained=trained,
    )
    num_pretraining = 0 if pretrained_in is None else num_pretraining_iterations(module)
    train_briefly(parts, watcher, num_iterations=num_pretraining + num_policy_iterations)
    return module
