"""Count the FLOPs and collectives of a simulated step, and answer reads of its fake tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import no_type_check

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from vapo.networks.token_inputs import TokenInputs
from vapo.studies.estimate.memory_tracker import ASKS_FOR_DEVICE
from vapo.system.private_attributes import propagates_shards

OPTIMIZER_STEP = "optimizer step"
# torch's name -> the collective's kind, and which argument is the whole tensor (None: the result)
_COLLECTIVES: dict[str, tuple[str, int | None]] = {
    "c10d._allgather_base_": ("all-gather", 0),
    "c10d.allgather_": ("all-gather", 0),
    "_c10d_functional.all_gather_into_tensor": ("all-gather", None),
    "c10d._reduce_scatter_base_": ("reduce-scatter", 1),
    "_c10d_functional.reduce_scatter_tensor": ("reduce-scatter", 0),
    "c10d.allreduce_": ("all-reduce", 0),
    "_c10d_functional.all_reduce": ("all-reduce", 0),
    "c10d.broadcast_": ("broadcast", 0),
}
KINDS = {kind for kind, _ in _COLLECTIVES.values()}
# torch's namespaces of collectives, and the operations in them that send nothing
_SENDING = ("c10d.", "_c10d_functional.", "_dtensor.")
_NOTHING_SENT = (
    *("c10d.barrier", "c10d.monitored_barrier_"),
    *("_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"),
)
# attention -> which argument is the query (key and value follow), and its cost in forwards
_ATTENTION = {
    "aten._scaled_dot_product_flash_attention_for_cpu": (0, 1.0),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (1, 2.5),
}


@dataclass
class StepWork:
    """The work of one GPU: FLOPs, and for each kind of collective their number and bytes.

    Bytes are counted of whole tensors, before they are sharded. A collective that is not in `KINDS`
    has torch's name as its kind, and the bytes of the largest among its arguments and its result.
    """

    flops: float = 0.0
    numbers: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, other: StepWork, times: int = 1) -> None:
        self.flops += times * other.flops
        for kind in other.numbers:
            self.numbers[kind] += times * other.numbers[kind]
            self.bytes[kind] += times * other.bytes[kind]


class StepCounts(TorchDispatchMode):
    """Counts what a step computes and sends. `parts` has (stage, work) of each part that began.

    Fake tensors have no numbers, so reads of them are answered here. A float is 0 and a bool is
    True, so that checks pass and every loss and norm is finite. An integer is the number of the
    critic that the micro-batch trains. In an optimizer step a number is 1, because Adam divides by
    the count of its steps. An index by a mask takes all elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[str, StepWork]] = []
        self._pairs = 0.0
        self._num_columns = 0
        self._member = 0

    def begin(self, stage: str, inputs: TokenInputs | None = None, *, member: int = 0) -> None:
        """Begin a part, a micro-batch or an optimizer step: count what follows under this stage.

        Args:
            inputs: the tokens of the micro-batch; None keeps the tokens of the part before.
            member: the number of the critic that the micro-batch trains.
        """
        self.parts.append((stage, StepWork()))
        self._member = member
        if inputs is not None:
            self._num_columns = inputs.input_ids.shape[1]
            segments = inputs.segments
            self._pairs = sum(s.length * (s.length / 2 + s.prompt_length) for s in segments)

    # shapes are not checked in these three: they run at every single operation
    @no_type_check
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls the operations on the local shards
        if func is ASKS_FOR_DEVICE:
            return args[0].__torch_dispatch__(func, types, args)
        name = str(func.overloadpacket)
        if name == "aten._local_scalar_dense":
            in_optimizer = bool(self.parts) and self.parts[-1][0] == OPTIMIZER_STEP
            if args[0].is_floating_point():
                return float(in_optimizer)
            return args[0].dtype is torch.bool or (1 if in_optimizer else self._member)
        if name == "aten.index":
            args = (args[0], [i for index in args[1] for i in _full_index(index)])
        result = func(*args, **(kwargs or {}))
        if self.parts and not propagates_shards():
            self._count(func.overloadpacket, name, args, kwargs or {}, result)
        return result

    @no_type_check
    def _count(self, operation, name, args, kwargs, result) -> None:
        work = self.parts[-1][1]
        if name.startswith(_SENDING) and name not in _NOTHING_SENT:
            kind, place = _COLLECTIVES.get(name, (name, None))
            wholes = [args[place]] if place is not None else [result]
            if name not in _COLLECTIVES:
                wholes += [*args, *kwargs.values()]
            work.numbers[kind] += 1
            work.bytes[kind] += max(map(_num_bytes, wholes))
        elif name in _ATTENTION:
            first, factor = _ATTENTION[name]
            work.flops += factor * self._attention(*(t.shape for t in args[first : first + 3]))
        elif operation in flop_registry:
            work.flops += flop_registry[operation](*args, **kwargs, out_val=result)

    @no_type_check
    def _attention(self, query, key, value) -> float:
        """Return the FLOPs of attention over the query-key pairs that it needs.

        Attention is causal. If rows hold several segments, it stays within each.
        """
        share = 0.5
        if query[2] == self._num_columns:
            share = self._pairs / (query[0] * query[2] * key[2])
        return share * sdpa_flop_count(query, key, value)


def _num_bytes(value: object) -> int:
    """Return the bytes of all tensors in a nested value."""
    return sum(t.nbytes for t in tree_iter(value) if isinstance(t, Tensor))


@no_type_check
def _full_index(index):
    """Return an index as a list; for a mask, an index of each dimension, as if all were True.

    The entries of these indices are 0: only their shapes count.
    """
    if index is None or index.dtype is not torch.bool:
        return [index]
    return [torch.zeros(index.numel(), dtype=torch.long) for _ in range(index.dim())]
