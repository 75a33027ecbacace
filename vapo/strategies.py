"""Sharding of actor and critic over processes (FSDP2), and what the other stages need of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vapo.config.schema import TrainerConfig


def make_strategy(trainer: TrainerConfig) -> str | Strategy:
    """Lightning's strategy of the config: one process, or every parameter sharded over all."""
    if trainer.strategy == "auto":
        return "auto"
    return ModelParallelStrategy(
        data_parallel_size=trainer.devices * trainer.num_nodes,
        tensor_parallel_size=1,
        save_distributed_checkpoint=False,
    )


def lightning_precision(trainer: TrainerConfig) -> Any:
    """Lightning's precision: a sharded run computes in bf16 by FSDP's own policy instead."""
    return "32-true" if trainer.strategy == "fsdp" else trainer.precision


def is_sharded(strategy: Strategy) -> bool:
    return isinstance(strategy, ModelParallelStrategy)


def shard(network: nn.Module, mesh: DeviceMesh, precision: str) -> None:
    """Shard each decoder layer, then the rest of the network. Reductions stay in float32."""
    policy = MixedPrecisionPolicy()
    if precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = network.get_submodule("model.model.layers")
    for layer in layers.children():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)


def set_gradient_sync(network: nn.Module, enabled: bool) -> None:
    """Reduce gradients over ranks in the last micro-batch's backward only."""
    if isinstance(network, FSDPModule):
        network.set_requires_gradient_sync(enabled)


@contextmanager
def gathered(network: nn.Module) -> Iterator[None]:
    """Hold the full weights on every rank, so that ranks may decode different lengths."""
    if not isinstance(network, FSDPModule):
        yield
        return
    modules = [m for m in network.modules() if isinstance(m, FSDPModule)]
    # the sampler calls inner modules; the root must have taken its role before they run
    network._get_fsdp_state()._lazy_init()
    for module in modules:
        module.unshard()
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(module is not network, recurse=False)
            module.reshard()


def full_state(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The full tensors of a network's state dict, one by one; every rank must walk it."""
    if isinstance(network, FSDPModule):
        network.reshard()  # after a forward without backward, the root's parameters stay whole
    for name, tensor in network.state_dict().items():
        yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
