"""The processes of a run: a check of their launcher, sums over ranks, and sharded networks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

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
from vapo.errors import UserError
from vapo.system.ports import check_port
from vapo.system.private_attributes import make_root
from vapo.system.process import is_main_process


def check_launch(trainer: TrainerConfig) -> None:
    """Check that the config has the number of processes that torchrun or srun started.

    Without these launchers only MASTER_PORT is checked, because Lightning itself then starts
    `trainer.devices` processes.

    Raises: UserError: the numbers differ; it names the keys and their values.
    """
    # this import takes three seconds, which commands with a single process do not need
    from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    if TorchElasticEnvironment.detect():
        launcher, count, per_host = "torchrun", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
    elif SLURMEnvironment.detect():
        launcher, count, per_host = "SLURM", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"
    else:  # Lightning starts the processes, which meet at MASTER_PORT, or else at a free port
        port = os.environ.get("MASTER_PORT", "")
        if trainer.devices * trainer.num_nodes > 1 and port and is_main_process():
            fix = "set MASTER_PORT to a free port, or unset it where there is one host"
            if not port.isdigit():
                raise UserError(f"MASTER_PORT is {port!r}, not a port; {fix}")
            check_port("", int(port), fix=fix)
        return
    world = int(os.environ[count])
    local = os.environ.get(per_host, "")
    devices = int(local) if local.isdigit() else world // trainer.num_nodes
    if trainer.devices == devices and devices * trainer.num_nodes == world:
        return
    strategy = " trainer.strategy=fsdp" if world > 1 else ""
    raise UserError(
        f"{launcher} started {world} processes ({devices} on each host), but trainer.devices is "
        f"{trainer.devices} and trainer.num_nodes {trainer.num_nodes}: set trainer.devices="
        f"{devices} trainer.num_nodes={max(world // max(devices, 1), 1)}{strategy}"
    )


T = TypeVar("T")


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _device(group: dist.ProcessGroup | None = None) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    if world_size() == 1:
        return tensor
    moved = tensor.detach().to(_device(), copy=True)
    dist.all_reduce(moved, op=op)
    return moved.to(tensor.device)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks, on its own device. Every rank must call this."""
    return _all_reduce(tensor, dist.ReduceOp.SUM)


def max_over_ranks(tensor: Tensor) -> Tensor:
    return _all_reduce(tensor, dist.ReduceOp.MAX)


def all_ranks(is_true: bool) -> bool:
    """Whether `is_true` is true on every rank. Every rank must call this."""
    return int(max_over_ranks(torch.tensor(int(not is_true)))) == 0


def leave_together(group: dist.ProcessGroup | None = None) -> None:
    """Wait, at the end of a process, until rank 0 gets here, too, and needs no other rank.

    What a process has sent and no other has read yet would be lost if the process ended.
    """
    if world_size() > 1:
        dist.broadcast(torch.zeros(1, device=_device(group)), src=0, group=group)


def gather_over_ranks(tensor: Tensor) -> Tensor:
    """Concatenate the rows of a tensor over all ranks, which may have different numbers of rows.
    Every rank must call this."""
    if world_size() == 1:
        return tensor
    return torch.cat(gather_objects(tensor.cpu())).to(tensor.device)


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks in the order of ranks. Every rank must call this."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def shard(
    network: nn.Module,
    mesh: DeviceMesh,
    trainer: TrainerConfig,
    *,
    in_float32: Iterable[nn.Module] = (),
) -> None:
    """Shard a network over the ranks of `mesh`: each decoder layer by itself, then the remainder.

    Reductions stay in float32. The layers `in_float32` are gathered in float32 in any precision.
    The network's inputs keep their dtype, since sums of log-probs would be wrong if these were
    rounded first.
    """
    policy = MixedPrecisionPolicy()
    if trainer.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = OffloadPolicy()
    if trainer.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    layers = network.get_submodule("model.model.layers")
    for layer in layers.children():
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    wide = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=policy.reduce_dtype)
    for layer in in_float32:
        fully_shard(layer, mesh=mesh, mp_policy=wide, offload_policy=offload)
    root = replace(policy, cast_forward_inputs=False)
    fully_shard(network, mesh=mesh, mp_policy=root, offload_policy=offload)


def fill_from_first_rank(
    network: nn.Module, load: Callable[[], nn.Module], mesh: DeviceMesh, *, offloads: bool
) -> None:
    """Give a sharded network on the meta device the weights that `load` returns on rank 0.

    Only rank 0 ever holds a whole network, in host memory. The others get their shards tensor by
    tensor; these stay in host memory if the network `offloads` them. Buffers that are not saved
    (rotary frequencies) are sent, too, because an empty one would be wrong without any error. They
    are always on the mesh's device.
    """
    network.to_empty(device="cpu" if offloads else mesh.device_type)
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
    """Move a module's buffers to a device. Parameters stay where they are."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))


def set_gradient_sync(network: nn.Module, enabled: bool) -> None:
    """Switch the reduction of a sharded network's gradients in backward passes on or off.

    Only the backward pass of a minibatch's last micro-batch needs it.
    """
    if isinstance(network, FSDPModule):
        network.set_requires_gradient_sync(enabled)


@contextmanager
def gathered(network: nn.Module) -> Iterator[None]:
    """Hold a sharded network's full weights on every rank in the block.

    Ranks may then decode different lengths. A network that is not sharded is left as it is.
    """
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
    """Shard the parameters of a sharded network's root module again.

    After a forward pass without a backward pass they would stay gathered.
    """
    if isinstance(network, FSDPModule):
        network.reshard()


def full_state(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and full tensor of each entry of a state dict. All ranks must iterate."""
    reshard(network)
    for name, tensor in network.state_dict().items():
        yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
