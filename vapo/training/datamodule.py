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
    """Return the trainer's datamodule, which must be a RolloutDataModule."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    assert isinstance(datamodule, RolloutDataModule)
    return datamodule


def iteration_of(trainer: L.Trainer) -> Iteration:
    """Return the iteration that is being trained on, or was trained on last."""
    return datamodule_of(trainer).iteration


class RolloutDataModule(L.LightningDataModule):
    """The run's LightningDataModule: each epoch that Lightning asks for is one iteration.

    The loader runs the iteration's stages (sampling, rewards, advantages) and then yields its
    minibatches. The datamodule holds the latest iteration, which callbacks read.

    Args:
        make_rollouts: makes the source of a module's rollouts, with its engine. It is called once
            the networks exist, and not at all for a run that is finished. `close` ends the engine.
        observers, trained, safe_point: see `IterationRunner`.
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
        """The runner of iterations, which is made when Lightning first asks for the loader."""
        assert self._runner is not None, "Lightning asks for the loader first"
        return self._runner

    @property
    def iteration(self) -> Iteration:
        """The iteration that is being trained on, or was trained on last."""
        assert self._iteration is not None, "it begins with the epoch's first minibatch"
        return self._iteration

    @property
    def source(self) -> RolloutSource:
        """The source of sampled rollouts. A run that reads all its rollouts from a file has no
        source, and must not ask for it."""
        assert self._source is not None, "all rollouts are a file's"
        return self._source

    @property
    def _source(self) -> RolloutSource | None:
        return None if self._runner is None else self._runner.source

    def train_dataloader(self) -> Sized:
        """Return the loader whose epochs are iterations, or an empty list if the run is finished.

        Lightning calls this once networks and optimizers are made or restored. If value pretraining
        and the policy phase have different numbers of minibatches, it is called before each
        iteration. The runner stays the same.
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
        """Make the runner of the module's iterations, of which about `total` are expected."""
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
        """Run the next iteration's stages, and return it; `iteration` holds it, too."""
        self._iteration = None  # one iteration's rollouts are in memory at a time
        self._iteration = self.runner.run(module.start)
        return self._iteration

    def transfer_batch_to_device(
        self, batch: Minibatch, device: torch.device, dataloader_idx: int
    ) -> Minibatch:
        """Return the minibatch unmoved, because `training_step` moves one micro-batch at a time."""
        return batch

    def on_exception(self, exception: BaseException) -> None:
        """Stop sampling ahead, so that no sampling thread outlives the run. Lightning calls this
        for every exception, Ctrl-C included."""
        if self._source is not None:
            self._source.cancel()

    def close(self) -> None:
        """Stop sampling ahead, and close the sampling engine."""
        if self._source is not None:
            self._source.cancel()
            self._source.collection.player.sampler.close()


@dataclass(frozen=True)
class IterationLoader:
    """Lightning's loader: each epoch runs an iteration's stages and yields its minibatches.

    Lightning creates one more iterator than it uses. The stages run when the first minibatch is
    requested, which is after the epoch has begun.
    """

    datamodule: RolloutDataModule
    module: VapoModule

    def __len__(self) -> int:
        """Return the number of minibatches of the next iteration, which depends on the phase."""
        return num_steps(self.datamodule.config, self.module.phase)

    def __iter__(self) -> Iterator[Minibatch]:
        yield from self.datamodule.next_iteration(self.module).minibatches


class WeightSync(Callback):
    """Sends the policy's weights to the sampling engine at the end of each iteration.

    It must come before every callback that uses the engine, and after `ValuePretraining`, which
    changes the phase.
    """

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        datamodule_of(trainer).runner.sync(pl_module.phase, actor_weights(pl_module))


@dataclass(eq=False)
class StopAtSafePoints(Callback):
    """Ends the run after a minibatch, on all processes at once, if any process was asked to stop.

    Between an iteration's stages the runner does the same by its `safe_point`. `peers` watches the
    other processes from the start of the run to its end.
    """

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
    """Return the functions by which a sampling engine reads and runs the actor."""

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
    """Yield the name and the tensor of each of the actor's weights, unsharded and with LoRA merged.

    Nothing is read before the first weight is asked for, so a module without an actor may be passed
    where no weights are sent.
    """
    yield from whole_weights(module.actor, module.config.actor.lora)
