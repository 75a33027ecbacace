"""All uses of private attributes of other libraries, each with its reason.

A test fails if such an attribute is gone, and if the package uses another one elsewhere.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

if TYPE_CHECKING:  # a second that commands without a Trainer do without
    import lightning as L


def leave_signals_alone(trainer: L.Trainer) -> None:
    """Switch Lightning's signal handlers off, because `vapo.runs.stopping` handles the signals.

    Lightning's handlers broadcast from inside a handler, which can hang with several processes, and
    requeue a SLURM job by themselves. No option turns them off.
    """
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    class NoSignals(_SignalConnector):
        def register_signal_handlers(self) -> None:
            pass

    trainer._signal_connector = NoSignals(trainer)


def checkpoint_state(trainer: L.Trainer) -> dict[str, Any]:
    """Return the whole state of the run. Every process must call this.

    Lightning's public method also writes the state, in the foreground and in its own files.
    """
    return trainer._checkpoint_connector.dump_checkpoint()


def make_root(network: FSDPModule) -> None:
    """Initialize a sharded network as FSDP2's root before one of its inner modules is called.

    Otherwise the first inner module that a sampler calls would become a root of its own. FSDP2 does
    it only in the root's forward pass, and has no public call for it.
    """
    network._get_fsdp_state()._lazy_init()


def set_device(module: torch.nn.Module, device: torch.device) -> None:
    """Set `module.device` without moving parameters, which the public `to` would do.

    With CPU offload the parameters stay on the host; buffers and computation are on the device.
    """
    from lightning.fabric.utilities.device_dtype_mixin import _update_properties

    _update_properties(module, device=device)


def attention_implementation(model: PreTrainedModel) -> str:
    """Return the name of the model's attention implementation, which has no public getter."""
    return str(model.config._attn_implementation)


def can_change_attention(model: PreTrainedModel) -> bool:
    """Whether attention goes through Transformers' AttentionInterface, which has no public flag."""
    return bool(model._supports_attention_backend and model._can_set_attn_implementation())


def has_attention(config: PreTrainedConfig, implementation: str) -> bool:
    """Whether a config's model class has this attention implementation. No public flag says so."""
    flags = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return bool(getattr(model_class, flags.get(implementation, ""), True))


def causal_lm_class(config: PreTrainedConfig) -> tuple[str, bool]:
    """Return the name of a config's causal model class, and whether it has a recurrent state.

    If there is no such class, they are "" and False. Transformers has no public flag for the state.
    """
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return "", False
    return model_class.__name__, bool(getattr(model_class, "_is_stateful", False))


def with_modules(module: torch.nn.Module, **modules: torch.nn.Module) -> torch.nn.Module:
    """Return a shallow copy of a module, with these children in place of its own.

    A child set in a plain copy would also be set in the original: both have the same dict.
    """
    view = copy(module)
    view.__dict__["_modules"] = {**module._modules, **modules}
    return view


def switch_adapters(layer: Any, *, off: bool) -> bool:
    """Turn the adapters of a peft layer off or on; return whether they were off before.

    The public `enable_adapters` also sets their `requires_grad`, which FSDP2 keeps from its first
    pass.
    """
    were_off = bool(layer._disable_adapters)
    layer._disable_adapters = off
    return were_off


def cpu_has_bfloat16_products() -> bool:
    """Whether the processor has instructions for bfloat16 products that torch's kernels use.

    Torch has no public function for it. On x86 its `_is_mkldnn_bf16_supported` is also true for
    processors that emulate them in float32.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage, also of a fake tensor."""
    return int(tensor.untyped_storage()._cdata)


def makes_fakes() -> bool:
    """Whether a FakeTensorMode is active, in which tensors have no values."""
    return torch._guards.active_fake_mode() is not None


class _Propagation(nullcontext[None]):
    """The context in which DTensor runs an operation on fake tensors to find its result's sharding.

    Nothing is computed or allocated in it. `is_on` says whether it is active.
    """

    is_on = False

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *error: object) -> None:
        self.is_on = False


_propagation = _Propagation()


def watch_propagation() -> None:
    """Install `_propagation` in place of a lock of DTensor's that does nothing.

    After that, `propagates_shards` can tell whether DTensor only finds a result's sharding.
    """
    ShardingPropagator._fake_mode_lock = _propagation


def propagates_shards() -> bool:
    """Whether the current operation runs on fake tensors, only to find its result's sharding."""
    return _propagation.is_on


def environment_bytes() -> Mapping[bytes, bytes]:
    """Return the environment variables as the bytes in which `os.environ` keeps them.

    They take a microsecond to copy or compare; `os.environ` takes 20 to 50, as it decodes every
    name and value.
    """
    return os.environ._data  # type: ignore[attr-defined]
