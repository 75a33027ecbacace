"""Short trainings that say what a setting can show: a run's beginning, and each network alone.

The module, the stages and the losses are a run's own; there are no checkpoints and no records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedTokenizerBase

from vapo.advantages.credit import value_places
from vapo.config import FitConfig, resolve
from vapo.functional.metrics import explained_variance
from vapo.prompts.load import PromptSplit
from vapo.rewards.scorer import Scorer
from vapo.rollouts.engines.contract import Sampler
from vapo.rollouts.source import RolloutSource
from vapo.rollouts.stored_rollouts import StoredRollouts
from vapo.studies.short_trainer import make_short_trainer
from vapo.system.progress import Progress
from vapo.training.callbacks.value_pretraining import ValuePretraining
from vapo.training.callbacks.weight_sync import WeightSync
from vapo.training.datamodule import RolloutDataModule
from vapo.training.heldout_critic import evaluated_returns
from vapo.training.iteration import IterationRunner, Networks
from vapo.training.minibatches import NETWORKS, Minibatch
from vapo.training.module import VapoModule
from vapo.training.schedule import phases_differ
from vapo.types import IterationStart, RolloutBatch, TrainingBatch


@dataclass(frozen=True)
class ProbeSetting:
    """What all probes of a config share. `make_sampler` makes the engine of a module's actor."""

    config: FitConfig
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSplit
    scorer: Scorer
    make_sampler: Callable[[VapoModule], Sampler]
    progress: Progress
    stored: StoredRollouts | None = None


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


class PartRunner(IterationRunner):
    """A run's stages, whose minibatches train some of the networks; the others stay as they are."""

    def __init__(
        self, rollouts: RolloutSource, networks: Networks, *, total: int, trained: Sequence[str]
    ) -> None:
        super().__init__(rollouts, networks, total=total)
        self.trained = trained

    def cut(
        self, batch: TrainingBatch, start: IterationStart, fault: str | None
    ) -> list[Minibatch]:
        return [
            replace(minibatch, networks=tuple(n for n in minibatch.networks if n in self.trained))
            for minibatch in super().cut(batch, start, fault)
        ]


class ProbeData(RolloutDataModule):
    """The data of one probe, which trains some of the networks; the scorer goes on to the next."""

    def __init__(self, setting: ProbeSetting, config: FitConfig, trained: Sequence[str]) -> None:
        super().__init__(
            config,
            prompts=setting.prompts,
            scorer=setting.scorer,
            make_sampler=setting.make_sampler,
            progress=setting.progress,
            tokenizer=setting.tokenizer,
            stored=setting.stored,
        )
        self.trained = trained

    def iteration_runner(self, module: VapoModule) -> IterationRunner:
        assert self.trainer is not None
        total = self.trainer.max_epochs or 0
        return PartRunner(self.rollouts, module, total=total, trained=self.trained)

    def close(self) -> None:
        """Stop what is sampled ahead, and the engine."""
        if hasattr(self, "rollouts"):
            self.rollouts.cancel()
        if hasattr(self, "player"):
            self.player.sampler.close()


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
    module = VapoModule(config, pad_id=int(setting.tokenizer.pad_token_id))
    datamodule = ProbeData(setting, config, trained)
    callbacks: list[Callback] = [WeightSync(setting.progress), watcher]
    num_pretraining = 0 if pretrained_in is None else resolve(config).value_pretraining_iterations
    if pretrained_in is not None:
        pretraining = ValuePretraining(
            config.components.value_pretraining,
            num_iterations=num_pretraining,
            critic_dir=pretrained_in,
            progress=setting.progress,
        )
        callbacks.insert(0, pretraining)
    trainer = make_short_trainer(
        config,
        callbacks,
        num_iterations=num_pretraining + num_policy_iterations,
        reload_every_n_epochs=int(phases_differ(config)),
    )
    with closing(datamodule):
        trainer.fit(module, datamodule)
    return module
