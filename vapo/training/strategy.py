"""Chooses Lightning's strategy and precision: one process, or parameters sharded over several."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy

from vapo.config.schema import TrainerConfig
from vapo.system.distributed import move_buffers
from vapo.system.private_attributes import set_device


def make_strategy(trainer: TrainerConfig) -> str | Strategy:
    """Return the strategy for `L.Trainer`: "auto" or one that shards the parameters."""
    if trainer.strategy == "auto":
        return "auto"
    return Sharding(
        offloads=trainer.cpu_offload,
        data_parallel_size=trainer.devices * trainer.num_nodes,
        tensor_parallel_size=1,
        save_distributed_checkpoint=trainer.sharded_checkpoints,
    )


class Sharding(ModelParallelStrategy):
    """A Lightning strategy that shards parameters over all processes.

    With `offloads` parameters and optimizer states stay in host memory; Lightning alone would move
    both to the GPU. Sums over ranks of tensors in host memory (the gradient's norm, gathered
    weights for a checkpoint) go through gloo.
    """

    def __init__(self, *, offloads: bool, **options: Any) -> None:
        backend = "cpu:gloo,cuda:nccl" if offloads and torch.cuda.is_available() else None
        super().__init__(**options, process_group_backend=backend)
        self.offloads = offloads
        self._host_states: list[Any] = []

    def model_to_device(self) -> None:
        if not self.offloads:
            super().model_to_device()
            return
        assert self.model is not None
        move_buffers(self.model, self.root_device)
        set_device(self.model, self.root_device)

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.offloads:  # hidden until `setup` has moved what it finds
            self._host_states = [optimizer.state for optimizer in self.optimizers]
            for optimizer in self.optimizers:
                optimizer.state = defaultdict(dict)

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        for optimizer, state in zip(self.optimizers, self._host_states, strict=False):
            optimizer.state = state


def lightning_precision(trainer: TrainerConfig) -> Any:
    """Return the `precision` argument for `L.Trainer`.

    A sharded run gets float32, because FSDP's own policy makes it compute in bfloat16. `auto` means
    float32, too: commands that choose by the device replace it before (`vapo.networks.precision`).
    """
    if trainer.strategy == "fsdp" or trainer.precision == "auto":
        return "32-true"
    return trainer.precision
