"""Sharding of actor and critic over processes (FSDP2), and what the other stages need of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from vapo.config.schema import TrainerConfig
from vapo.system.private_attributes import make_root


def shard(network: nn.Module, mesh: DeviceMesh, trainer: TrainerConfig) -> None:
    """Shard each decoder layer, then the rest of the network. Reductions stay in float32."""
    policy = MixedPrecisionPolicy()
    if trainer.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = OffloadPolicy()
    if trainer.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    layers = network.get_submodule("model.model.layers")
    for layer in layers.children():
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(network, mesh=mesh, mp_policy=policy, offload_policy=offload)


def fill_from_first_rank(
    network: nn.Module, load: Callable[[], nn.Module], mesh: DeviceMesh
) -> None:
    """Give a sharded network on the meta device the weights that rank 0 loads.

    Only rank 0 ever holds a whole network, in host memory; tensor by tensor the others get
    their shards. Buffers that are not saved (rotary frequencies) come along, for an empty one
    would be wrong without a sign.
    """
    network.to_empty(device=mesh.device_type)
    source = load() if dist.get_rank() == 0 else None
    set_model_state_dict(
        network,
        {} if source is None else source.state_dict(),
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    for name, buffer in network.named_buffers():
        if source is not None:
            buffer.copy_(source.get_buffer(name))
        dist.broadcast(buffer, src=0)
    move_buffers(network, mesh.device_type)


def move_buffers(module: nn.Module, device: torch.device | str) -> None:
    """Buffers to the device, parameters left where they are."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))


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
    make_root(network)
    for module in modules:
        module.unshard()
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(module is not network, recurse=False)
            module.reshard()


def reshard(network: nn.Module) -> None:
    """After a forward without backward, the root's own parameters stay whole until this."""
    if isinstance(network, FSDPModule):
        network.reshard()


def full_state(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The full tensors of a network's state dict, one by one; every rank must walk it."""
    reshard(network)
    for name, tensor in network.state_dict().items():
        yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
