"""Lightning's side of an iteration: its minibatches, and the engine's access to the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from vapo.config import FitConfig
from vapo.networks.lora import whole_weights
from vapo.networks.token_inputs import TokenInputs
from vapo.rollouts.engines.selection import ActorAccess
from vapo.rollouts.source import RolloutSource
from vapo.runs.stopping import Peers, Stopping
from vapo.system.distributed import gathered
from vapo.system.progress import Progress
from vapo.training.iteration import Iteration, IterationRunner, Observer, Rollouts
from vapo.training.minibatches import NETWORKS, Minibatch, num_steps
from vapo.training.module import VapoModule


def datamodule_of(trainer: L.Trainer) -> RolloutDataModule:
    """The RolloutDataModule that the trainer was given."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    assert isinstance(datamodule, RolloutDataModule)
    return datamodule


def iteration_of(trainer: L.Trainer) -> Iteration:
    """The iteration that is being trained on, or was trained on last."""
    return datamodule_of(trainer).iteration


class RolloutDataModule(L.LightningDataModule):
    """Makes the iterations of a module once its networks are there, and holds the one in training.

    Args:
        make_rollouts: where a module's rollouts come from; called for a run that has something to
            do. The engine is its own, and closed with it.
        observers, trained, safe_point: `IterationRunner`'s.
    """

    def __init__(
        self,
        config: FitConfig,
        make_rollouts: Callable[[VapoModule], Rollouts],
        *,
        progress: Progress,
        observers: Sequence[Observer] = (),
        trained: Sequence[str] = NETWORKS,
        safe_point: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.config = config
        self.make_rollouts = make_rollouts
        self.progress = progress
        self.observers = observers
        self.trained = trained
        self.safe_point = safe_point
        self._runner: IterationRunner | None = None
        self._iteration: Iteration | None = None

    @property
    def runner(self) -> IterationRunner:
        """What runs the stages, from the first loader on."""
        assert self._runner is not None, "Lightning asks for the loader first"
        return self._runner

    @property
    def iteration(self) -> Iteration:
        """The iteration that is being trained on, or was trained on last."""
        assert self._iteration is not None, "it begins with the epoch's first minibatch"
        return self._iteration

    @property
    def source(self) -> RolloutSource:
        """The rollouts of a run that has an engine."""
        assert self._source is not None, "all rollouts are a file's"
        return self._source

    @property
    def _source(self) -> RolloutSource | None:
        return None if self._runner is None else self._runner.source

    def train_dataloader(self) -> Sized:
        """Lightning asks once, when networks and optimizers are as the run begins or resumes.

        Where the phases differ in their numbers of minibatches it asks before each iteration; the
        runner stays the same.
        """
        assert self.trainer is not None, "the datamodule is used through a Trainer"
        module = self.trainer.lightning_module
        assert isinstance(module, VapoModule)
        if module.is_finished:  # Lightning asks before it looks whether there is more to do
            self.progress.note(
                "the run has all its iterations already: nothing is left to do. To train it "
                f"further, raise training.num_iterations ({self.config.training.num_iterations})"
            )
            return []
        if self._runner is None or self._runner.networks is not module:
            self._runner = self.make_runner(module, total=self.trainer.max_epochs or 0)
        return IterationLoader(self, module)

    def make_runner(self, module: VapoModule, *, total: int) -> IterationRunner:
        return IterationRunner(
            self.config,
            self.make_rollouts(module),
            module,
            progress=self.progress,
            total=total,
            observers=self.observers,
            trained=self.trained,
            safe_point=self.safe_point,
        )

    def next_iteration(self, module: VapoModule) -> Iteration:
        """Run the stages of the iteration that begins."""
        self._iteration = None  # one iteration's rollouts are in memory at a time
        self._iteration = self.runner.run(module.start)
        return self._iteration

    def transfer_batch_to_device(
        self, batch: Minibatch, device: torch.device, dataloader_idx: int
    ) -> Minibatch:
        """Micro-batches are moved one at a time, in the module's `training_step`."""
        return batch

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's hook, Ctrl-C included: no thread outlives the run."""
        if self._source is not None:
            self._source.cancel()

    def close(self) -> None:
        """Stop what is sampled ahead, and the engine."""
        if self._source is not None:
            self._source.cancel()
            self._source.collection.player.sampler.close()


@dataclass(frozen=True)
class IterationLoader:
    """What Lightning iterates over: each epoch runs the stages, then yields the minibatches.

    Lightning creates one more iterator than it uses. The stages run when the first minibatch is
    requested, which is after the epoch has begun.
    """

    datamodule: RolloutDataModule
    module: VapoModule

    def __len__(self) -> int:
        """Return the number of steps of the next iteration, which depends on the phase."""
        return num_steps(self.datamodule.config, self.module.phase)

    def __iter__(self) -> Iterator[Minibatch]:
        yield from self.datamodule.next_iteration(self.module).minibatches


class WeightSync(Callback):
    """Ends an iteration with its last stage; must come before every callback that uses the engine,
    and after `ValuePretraining`, which ends the phase."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        datamodule_of(trainer).runner.sync(pl_module.phase, actor_weights(pl_module))


@dataclass(eq=False)
class StopAtSafePoints(Callback):
    """After each minibatch all processes agree; the datamodule does the same between stages."""

    stopping: Stopping
    peers: Peers

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.peers.watch(getattr(trainer.strategy.launcher, "procs", []))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self.stopping.safe_point()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.peers.close()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if self.stopping.requested:
            self.peers.close()


def actor_access(module: VapoModule) -> ActorAccess:
    """What a sampling engine needs of the module's own actor."""

    def logprobs(inputs: TokenInputs) -> Tensor:
        with module.trainer.precision_plugin.forward_context():
            return inputs.scatter(module.actor(inputs, temperature=1.0).logprobs)

    return ActorAccess(
        model=module.actor.model,
        device=module.device,
        weights=lambda: actor_weights(module),
        logprobs=logprobs,
        gather=lambda: gathered(module.actor),
        local_rank=module.local_rank,
    )


def actor_weights(module: VapoModule) -> Iterator[tuple[str, Tensor]]:
    """Yield the actor's full weights. Begun only where they are sent: a module that trains its
    critic alone has no actor."""
    yield from whole_weights(module.actor, module.config.actor.lora)
