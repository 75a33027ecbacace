"""After every policy iteration, the sampling engine gets the actor's weights."""

from __future__ import annotations

from collections.abc import Iterator

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from vapo.networks.lora import merged
from vapo.system.progress import Progress
from vapo.system.sharding import full_state
from vapo.training.datamodule import datamodule_of
from vapo.training.module import VapoModule
from vapo.types import Phase


def actor_weights(module: VapoModule) -> Iterator[tuple[str, Tensor]]:
    """Yield the actor's full weights under the model folder's names; every rank must iterate.

    A state dict names a tied weight twice, a list of parameters once: an engine that unties them
    would miss the second. Adapters are merged.
    """
    weights = ((name.removeprefix("model."), tensor) for name, tensor in full_state(module.actor))
    yield from merged(weights, module.config.actor.lora)


class WeightSync(Callback):
    """Push the actor's full weights into the sampler at the end of a policy iteration.

    Rollouts that are sampled ahead are waited for where the config says so, so this must come
    before every callback that uses the engine.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        datamodule = datamodule_of(trainer)
        datamodule.rollouts.before_update()
        if pl_module.phase is Phase.POLICY_OPTIMIZATION:
            with self.progress.stage("weight_sync"):
                datamodule.player.sampler.sync(actor_weights(pl_module))
