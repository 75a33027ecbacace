"""A config's module, data and callbacks, for a Lightning Trainer of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.prompts.load import PromptSplit
from vapo.rewards.scorer import scorer_of
from vapo.rollouts.stored_rollouts import StoredRollouts
from vapo.system.progress import Progress
from vapo.training.actor_access import sampler_maker
from vapo.training.callbacks.value_pretraining import ValuePretraining
from vapo.training.callbacks.weight_sync import WeightSync
from vapo.training.datamodule import RolloutDataModule
from vapo.training.module import VapoModule
from vapo.training.trainer import num_pretraining_iterations, trainer_options


@dataclass(frozen=True)
class TrainingParts:
    """What `L.Trainer` needs to train a config.

    Attributes:
        module: the LightningModule, actor and critic.
        datamodule: each of its epochs is one iteration: it samples, judges and cuts minibatches.
        callbacks: the two that training itself needs: value pretraining with its switch to the
            policy phase, and the weights' way to the sampling engine.
        trainer_options: arguments of `L.Trainer` that follow from the config: devices, strategy,
            precision, the number of epochs, and how Lightning treats the loader.
    """

    module: VapoModule
    datamodule: RolloutDataModule
    callbacks: list[Callback]
    trainer_options: dict[str, Any]


@contextmanager
def training_parts(
    config: FitConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptSplit,
    stored: StoredRollouts | None,
    folder: Path,
) -> Iterator[TrainingParts]:
    """The parts of a training; verifiers' processes and the engine end with the context.

    `folder` is where value pretraining saves its critic, as `pretrained_critic`.
    """
    with (
        Progress(live=False) as progress,
        scorer_of(config) as scorer,
    ):
        progress.note(prompts.report.describe())
        module = VapoModule(config, pad_id=int(tokenizer.pad_token_id))
        datamodule = RolloutDataModule(
            config,
            prompts=prompts,
            scorer=scorer,
            make_sampler=sampler_maker(config, tokenizer),
            progress=progress,
            stored=stored,
            tokenizer=tokenizer,
        )
        callbacks: list[Callback] = [
            ValuePretraining(
                config.components.value_pretraining,
                num_iterations=num_pretraining_iterations(module),
                critic_dir=folder / "pretrained_critic",
                progress=progress,
            ),
            WeightSync(progress),
        ]
        with closing(datamodule):
            yield TrainingParts(module, datamodule, callbacks, trainer_options(config, module))
