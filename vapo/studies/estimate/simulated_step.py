"""Run a config's training steps on fake tensors, as one of N ranks; the others do not exist."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_iter
from torch.utils.data import DataLoader

from vapo.config import FitConfig
from vapo.networks.actor_critic import members_of
from vapo.networks.packed_attention import counts_for_gpu
from vapo.networks.precision import computing_dtype
from vapo.networks.probe import ProbeForSequenceClassification
from vapo.networks.token_inputs import token_inputs
from vapo.studies.estimate.cut_minibatch import Cut, cut_minibatch, fake_rows
from vapo.studies.estimate.stage_tracker import ShardedStageTracker, StageTracker
from vapo.studies.estimate.step_counts import OPTIMIZER_STEP, StepCounts, StepWork
from vapo.system.private_attributes import checkpoint_state, watch_propagation
from vapo.training.minibatches import Microbatch, Microbatches, Minibatch, passes
from vapo.training.module import VapoModule
from vapo.training.strategy import lightning_precision, make_strategy
from vapo.types import Phase


@dataclass
class Simulation:
    """What the training steps of one GPU need.

    Attributes:
        num_ranks: the number of GPUs, of which one is simulated.
        peaks: (phase, stage) -> part -> bytes at the stage's peak.
        work: (phase, network) -> the work of one optimizer step.
        microbatches: network -> the number of micro-batches of one optimizer step.
        checkpoint: the bytes of a checkpoint that this rank writes.
    """

    num_ranks: int
    peaks: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    work: dict[tuple[str, str], StepWork] = field(default_factory=dict)
    microbatches: dict[str, int] = field(default_factory=dict)
    checkpoint: float = 0.0


def simulate(config: FitConfig) -> Simulation:
    """Run one minibatch of each network in each phase, then a checkpoint, on fake tensors.

    Only the models' config.json are loaded. All prompts and responses are as long as they may be.
    Of a minibatch's micro-batches, one of each size runs (`cut_minibatch`).
    """
    watch_propagation()
    num_ranks = config.trainer.num_ranks
    # as in the arithmetic: the columns of log-probs are small beside the hidden states, and a
    # regression cannot be solved without numbers
    config = replace(config, critic=replace(config.critic, sampled_logprobs=None, ridge=None))
    module = _SimulatedModule(config)
    sharded = config.trainer.strategy == "fsdp"
    if sharded:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        L.Trainer(
            accelerator="cpu",
            devices=num_ranks,
            strategy=make_strategy(config.trainer),
            precision=lightning_precision(config.trainer),
            plugins=[_OneOfRanks(num_ranks)] if sharded else None,
            max_epochs=len(module.phases),
            reload_dataloaders_every_n_epochs=1,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, weights_only=True)
    finally:
        if sharded:
            dist.destroy_process_group()
    return module.simulation


class _OneOfRanks(LightningEnvironment):
    """The environment of rank 0 of `num_ranks` processes. No other process is started."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks = num_ranks

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self.num_ranks

    def set_world_size(self, size: int) -> None:
        pass

    def local_rank(self) -> int:
        return 0


class _SimulatedModule(VapoModule):
    """The training module with networks, batches and optimizers of fake tensors.

    `simulation` collects the results.
    """

    def __init__(self, config: FitConfig) -> None:
        super().__init__(config, pad_id=0)
        self.simulation = Simulation(config.trainer.num_ranks)
        self.phases = [Phase.POLICY_OPTIMIZATION]
        if self.has_critic and self.hyperparameters.value_pretraining_iterations > 0:
            self.phases.insert(0, Phase.VALUE_PRETRAINING)
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.counts, self.tracker = StepCounts(), StageTracker()
        self.cuts: dict[str, Cut] = {}  # network -> its minibatch
        self.stands_for_gpu = config.trainer.accelerator != "cpu"

    # ---- what Lightning calls --------------------------------------------------------------

    def configure_model(self) -> None:
        with self.fakes:
            super().configure_model()

    def configure_optimizers(self) -> tuple[list[Optimizer], list[LambdaLR]]:
        with self.fakes:
            return super().configure_optimizers()

    def on_fit_start(self) -> None:
        pass  # fake weights have no lineage to note

    def to(self, *args: Any, **kwargs: Any) -> _SimulatedModule:
        return self  # fake tensors stay where they are

    def cpu(self) -> _SimulatedModule:
        return self

    def train_dataloader(self) -> DataLoader[Minibatch]:
        trained = [part.networks for part in passes(self.config, self._phase_of_epoch)]
        minibatches = [self._minibatch(networks) for networks in dict.fromkeys(trained)]
        return DataLoader(minibatches, batch_size=None)  # type: ignore[arg-type]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, index: int) -> Any:
        return batch

    def on_train_epoch_start(self) -> None:
        self.phase = self._phase_of_epoch
        super().on_train_epoch_start()

    @property
    def _phase_of_epoch(self) -> Phase:
        return self.phases[self.trainer.current_epoch]

    def training_step(self, minibatch: Minibatch, batch_idx: int) -> dict[str, float]:
        optimizers = self.trainer.optimizers
        sharded = self.device_mesh is not None
        self.tracker = ShardedStageTracker(self.actor) if sharded else StageTracker()
        hooks = self.tracker.watch([self, *self._reference], optimizers)
        self.counts = StepCounts()
        hooks += [o.register_step_pre_hook(self._begin_step) for o in optimizers]
        with self.fakes, self.tracker, self.counts, counts_for_gpu(self.stands_for_gpu):
            metrics = super().training_step(minibatch, batch_idx)
        for hook in hooks:
            hook.remove()
        self.policy_steps = torch.zeros_like(self.policy_steps)  # the step made it a fake tensor
        self._note_step()
        return metrics

    def _begin_step(self, *_: Any) -> None:
        self.counts.begin(OPTIMIZER_STEP)
        self.tracker.stage = OPTIMIZER_STEP

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        if self.phase is self.phases[-1]:
            with self.fakes, StepCounts():
                state = checkpoint_state(self.trainer)
                tensors = [t for t in tree_iter(state) if isinstance(t, Tensor)]
                local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
            self.simulation.checkpoint = sum(t.nbytes for t in local)

    # ---- minibatches and what they needed --------------------------------------------------

    def _minibatch(self, networks: tuple[str, ...]) -> Minibatch:
        cuts = {}
        for name in networks:
            cut = self.cuts[name] = cut_minibatch(self.config, name, self.layout)
            self.simulation.microbatches[name] = cut.num_microbatches
            chunks = [[index] for index in range(len(cut.run))]
            cuts[name] = Microbatches(chunks, partial(self._microbatch, name))
        counts: dict[str, Any] = dict.fromkeys(_COUNTS, 1)
        return Minibatch(
            microbatches=cuts.get("actor", cuts[networks[-1]]),
            critic_microbatches=cuts.get("critic"),
            networks=networks,
            max_response_tokens=self.config.rollouts.max_response_tokens,
            num_value_draws=1.0,
            **counts,
        )

    def _microbatch(self, name: str, chunk: list[int]) -> Microbatch:
        """Make the fake micro-batch that a network reads next, and begin that network's stage.

        Args:
            chunk: one index of `Cut.run`.
        """
        size, member = self.cuts[name].run[chunk[0]]
        prompts = [[i % size.prompts] * size.prompt_tokens for i in range(size.rows)]
        pairs = [(prompt, [0] * size.response_tokens) for prompt in prompts]
        with no_dispatch():
            real = token_inputs(pairs, pad_id=0, layout=self.layout)
        self.counts.begin(f"{name} update", real, member=member)
        self.tracker.stage = f"{name} update"
        self.tracker.memory_tracking.clear()  # else a second forward is an error
        tensors: dict[str, Any] = {
            f.name: self.fakes.from_tensor(value)
            for f in fields(real)
            if isinstance(value := getattr(real, f.name), Tensor)
        }
        if name == "critic" and isinstance(
            model := members_of(self.critic)[0].model, ProbeForSequenceClassification
        ):
            dtype = computing_dtype(self.config, self.config.actor.dtype)
            tensors["actor_states"] = model.empty_states(len(real.targets), dtype)
        has_kl = self.config.algorithm.kl.coef > 0
        members = torch.full((size.rows,), member) if self.config.critic.count > 1 else None
        rows = fake_rows(size.rows, size.response_tokens, has_kl=has_kl, critic_members=members)
        return Microbatch(replace(real, **tensors), rows)

    def _note_step(self) -> None:
        phase = self.start.phase.value
        for stage, parts in self.tracker.parts().items():
            previous = self.simulation.peaks.get((phase, stage), {})
            if sum(parts.values()) > sum(previous.values()):
                self.simulation.peaks[phase, stage] = parts
        for network, cut in self.cuts.items():
            works = [work for stage, work in self.counts.parts if stage == f"{network} update"]
            if works:
                self.simulation.work[phase, network] = cut.work(works)


_COUNTS = [
    f.name for f in fields(Minibatch) if f.name.startswith("num_") and f.name != "num_value_draws"
]
