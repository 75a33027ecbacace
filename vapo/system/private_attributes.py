"""Every private attribute of another library that the package touches, each with its reason.

A test fails when one of them goes, and when another one is touched elsewhere.
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
    """Lightning's handlers broadcast from inside a handler, and requeue a SLURM job by themselves.

    With several processes the first can hang, and no option turns them off;
    `vapo.runs.stopping` takes the signals instead.
    """
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    class NoSignals(_SignalConnector):
        def register_signal_handlers(self) -> None:
            pass

    trainer._signal_connector = NoSignals(trainer)


def checkpoint_state(trainer: L.Trainer) -> dict[str, Any]:
    """The whole state of the run; every process must call it.

    Lightning's public way writes it in the same call, in the foreground, through its own files.
    """
    return trainer._checkpoint_connector.dump_checkpoint()


def make_root(network: FSDPModule) -> None:
    """Let a sharded network take its role as root before an inner module is called.

    Otherwise the first inner module that a sampler calls would become a root of its own. FSDP2
    does it in the root's forward pass, and has no other call for it.
    """
    network._get_fsdp_state()._lazy_init()


def set_device(module: torch.nn.Module, device: torch.device) -> None:
    """What `module.device` says; the public `to` would move the parameters, which stay on the host.

    For CPU offload: the buffers and the computation are on the device.
    """
    from lightning.fabric.utilities.device_dtype_mixin import _update_properties

    _update_properties(module, device=device)


def attention_implementation(model: PreTrainedModel) -> str:
    """The name in force; Transformers has a public setter and no getter."""
    return str(model.config._attn_implementation)


def can_change_attention(model: PreTrainedModel) -> bool:
    """Whether attention goes through Transformers' AttentionInterface, which has no public flag."""
    return bool(model._supports_attention_backend and model._can_set_attn_implementation())


def has_attention(config: PreTrainedConfig, implementation: str) -> bool:
    """Whether a config's causal language model has this kernel in Transformers; no public flag."""
    flags = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return bool(getattr(model_class, flags.get(implementation, ""), True))


def causal_lm_class(config: PreTrainedConfig) -> tuple[str, bool]:
    """Return the name of a config's causal language model, and whether it has a recurrent state.

    Without such a class they are "" and False. Transformers has no public flag for the state.
    """
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return "", False
    return model_class.__name__, bool(getattr(model_class, "_is_stateful", False))


def with_modules(module: torch.nn.Module, **modules: torch.nn.Module) -> torch.nn.Module:
    """A view of a module with other children of these names; it shares all else.

    Setting a child of a plain copy would set it in the original, too: they have one dict of them.
    """
    view = copy(module)
    view.__dict__["_modules"] = {**module._modules, **modules}
    return view


def switch_adapters(layer: Any, *, off: bool) -> bool:
    """Turn the adapters of a layer of peft's off or on; whether they were off before.

    The public `enable_adapters` takes their gradients away, too, which FSDP2 would keep of its
    first pass.
    """
    were_off = bool(layer._disable_adapters)
    layer._disable_adapters = off
    return were_off


def cpu_has_bfloat16_products() -> bool:
    """Whether the processor has instructions for bfloat16 products, and torch's kernels use them.

    Torch has no public question. On x86 its own `_is_mkldnn_bf16_supported` is true of processors
    that emulate them in float32, too.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies a storage, fake ones too: their `data_ptr` is 0."""
    return int(tensor.untyped_storage()._cdata)


def makes_fakes() -> bool:
    """Whether tensors are made without values, by a FakeTensorMode that is entered."""
    return torch._guards.active_fake_mode() is not None


class _Propagation(nullcontext[None]):
    """Is entered around DTensor's run of an operation on fakes of the whole tensors.

    It finds out a result's sharding by it; nothing of it is computed or allocated in a real run.
    """

    is_on = False

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *error: object) -> None:
        self.is_on = False


_propagation = _Propagation()


def watch_propagation() -> None:
    """Let `propagates_shards` know; DTensor has a lock at this place, which does nothing."""
    ShardingPropagator._fake_mode_lock = _propagation


def propagates_shards() -> bool:
    """Whether the operation of the moment only tells DTensor about its result."""
    return _propagation.is_on


def environment_bytes() -> Mapping[bytes, bytes]:
    """The environment as `os.environ` keeps it, to be copied and compared in a microsecond.

    A copy of `os.environ` itself takes 20 to 50: it decodes each name and each value.
    """
    return os.environ._data  # type: ignore[attr-defined]
