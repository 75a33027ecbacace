"""Memory of a simulated step by stage and part: torch's trackers, on one process or sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
from torch import Tensor, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from vapo.system.private_attributes import propagates_shards

# torch's names of what a storage holds, and those of the table
PARTS = {
    "Sharded Param": "weights",
    "Parameter": "weights",
    "Buffer": "weights",
    "Unsharded Param": "gathered weights",
    "All Gather": "gathered weights",
    "Sharded Grad": "gradients",
    "Gradient": "gradients",
    "Other": "gradients",  # named to the tracker by `StageTracker.watch`
    "Unsharded Grad": "gradients",
    "Reduce Scatter": "gradients",
    "OptState": "optimizer states",
    "Optstate": "optimizer states",
    "Activation": "activations, temporaries",
    "Temp": "activations, temporaries",
    "Inputs": "activations, temporaries",
}


AT_REST = "at rest"


class _BackwardTracker(ModTracker):
    """Tells a backward from a forward. Torch's hooks on modules keep gradients of frozen ones."""

    @no_type_check
    def get_known_fqn(self, mod) -> str:
        return ""

    def __enter__(self) -> _BackwardTracker:
        return self

    def __exit__(self, *args: Any) -> None:
        pass


class StageTracker(MemTracker):
    """Bytes of each part at the peak of each stage; `stage` is set from outside.

    Torch's notes on every module are left out: they take most of its time.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._mod_tracker = _BackwardTracker()
        self.stage = AT_REST
        self.peaks: dict[str, dict[str, float]] = {}
        self._curr_mem_snap: dict[torch.device, dict[str, int]] = {}

    # shapes are not checked in these: they run at every single operation
    @no_type_check
    def get_tracker_snapshot(self, type: str = "current") -> dict[Any, Any]:
        return {}

    @no_type_check
    def _update_peak_stats(self, peak_state: Any) -> None:
        for parts in self._curr_mem_snap.values():  # of one device
            if parts["Total"] > self.peaks.get(self.stage, {}).get("Total", 0):
                self.peaks[self.stage] = dict(parts)

    @no_type_check
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if propagates_shards():
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def watch(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> list[RemovableHandle]:
        """Know what lies in memory before the step, and its gradients; before it is entered."""
        self.track_external(*modules, *optimizers)
        parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        return [p.register_post_accumulate_grad_hook(self._note_gradient) for p in parameters]

    def _note_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.track_external(parameter.grad)

    @no_type_check
    def _track_module_params_and_buffers(self, module, install_grad_hooks=False):
        # torch's own hooks are an error on frozen weights
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)

    def parts(self) -> dict[str, dict[str, float]]:
        """The bytes of each part at the peak of each stage, under the names of the table."""
        found: dict[str, dict[str, float]] = {}
        for stage, peak in self.peaks.items():
            parts = found[stage] = dict.fromkeys(PARTS.values(), 0.0)
            for kind, size in peak.items():
                if kind != "Total":
                    parts[PARTS[getattr(kind, "value", kind)]] += size
            # torch takes the temporaries of an optimizer for its states
            more = parts["optimizer states"] - found[AT_REST]["optimizer states"]
            parts["optimizer states"] -= more
            parts["activations, temporaries"] += more
        return found


class ShardedStageTracker(StageTracker, FSDPMemTracker):
    """The same of actor and critic, each sharded, with an optimizer of its own."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self._optimizers: Sequence[Optimizer] = ()

    def watch(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> list[RemovableHandle]:
        self._optimizers = optimizers
        self._root_mod: Any = nn.ModuleList(
            modules
        )  # torch asks for one sharded root, and walks it
        return []

    def _instrument_optimizer(self) -> None:
        handles: list[Any] = []
        for optimizer in self._optimizers:
            self._optm = optimizer
            super()._instrument_optimizer()
            handles += self._optimizer_hook_handles or ()
        self._optimizer_hook_handles: Any = handles
