"""Track the memory of a simulated step by stage and part, for one process or a sharded one.

It adapts torch's memory trackers.
"""

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

# torch's names for what a storage holds -> rows of the table
PARTS = {
    "Sharded Param": "weights",
    "Parameter": "weights",
    "Buffer": "weights",
    "Unsharded Param": "gathered weights",
    "All Gather": "gathered weights",
    "Sharded Grad": "gradients",
    "Gradient": "gradients",
    "Other": "gradients",  # `StageTracker.watch` registers them with the tracker
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
    """Tells a backward from a forward, in place of torch's tracker of modules.

    It sets no hooks on modules, because torch's hooks keep the gradients of frozen modules.
    """

    @no_type_check
    def get_known_fqn(self, mod) -> str:
        return ""

    def __enter__(self) -> _BackwardTracker:
        return self

    def __exit__(self, *args: Any) -> None:
        pass


class StageTracker(MemTracker):
    """Tracks the bytes of each part at the peak of each stage. Set `stage` when a stage begins.

    It skips torch's statistics of every module, which would take most of the time.
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
        for parts in self._curr_mem_snap.values():  # there is one device
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
        """Register the tensors that lie in memory before the step, and gradients as they appear.

        Call it before entering the tracker. Remove the hooks that it returns after the step.
        """
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
        """Return stage -> part -> bytes at the stage's peak. Parts have the names in `PARTS`."""
        stages: dict[str, dict[str, float]] = {}
        for stage, peak in self.peaks.items():
            parts = stages[stage] = dict.fromkeys(PARTS.values(), 0.0)
            for kind, size in peak.items():
                if kind != "Total":
                    parts[PARTS[getattr(kind, "value", kind)]] += size
            # torch counts an optimizer's temporaries as its states
            temporaries = parts["optimizer states"] - stages[AT_REST]["optimizer states"]
            parts["optimizer states"] -= temporaries
            parts["activations, temporaries"] += temporaries
        return stages


class ShardedStageTracker(StageTracker, FSDPMemTracker):
    """A `StageTracker` for a sharded actor and critic, each of which has its own optimizer."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self._optimizers: Sequence[Optimizer] = ()

    def watch(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> list[RemovableHandle]:
        self._optimizers = optimizers
        # torch needs one sharded root, whose modules it visits
        self._root_mod: Any = nn.ModuleList(modules)
        return []

    def _instrument_optimizer(self) -> None:
        handles: list[Any] = []
        for optimizer in self._optimizers:
            self._optm = optimizer
            super()._instrument_optimizer()
            handles += self._optimizer_hook_handles or ()
        self._optimizer_hook_handles: Any = handles
