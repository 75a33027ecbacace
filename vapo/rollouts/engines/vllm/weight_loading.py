"""Loads new weights into a vLLM worker: directly into its parameters, where nothing forbids it.

vLLM's own `reload_weights` serves every model: it sets a layer's parameters aside, gathers the new
ones beside them, processes them as quantization or a kernel needs it, and copies the result. An
unquantized model on a GPU needs none of this: its kernels read its parameters, so each new weight
can be copied to its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def load_into(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load weights, as (name, tensor) pairs with the names of a checkpoint, into a vLLM worker."""
    if loads_directly(worker.get_model(), worker.vllm_config):
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(worker.vllm_config):  # as around `reload_weights`
            worker.get_model().load_weights(weights)
    else:
        worker.reload_weights(weights_iterator=iter(weights))


def loads_directly(model: nn.Module, config: Any) -> bool:
    """Whether new weights can be copied directly into a vLLM model's parameters.

    They cannot where vLLM processes the parameters after loading. It does that for quantization,
    for adapters, for some models as a whole, for attention with compressed keys and values, for
    experts, and where a kernel keeps a packed copy.

    Args:
        config: vLLM's own `VllmConfig`.
    """
    if config.quant_config is not None or config.lora_config is not None:
        return False
    if hasattr(model, "process_weights_after_loading"):
        return False
    return all(_reads_parameters(layer) for layer in model.modules())


def _reads_parameters(layer: nn.Module) -> bool:
    """Whether vLLM leaves a layer's parameters as they are loaded."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    method = getattr(layer, "quant_method", None)
    if method is not None and type(method) not in (
        UnquantizedLinearMethod,
        UnquantizedEmbeddingMethod,
    ):
        return False
    if type(layer) is Attention:  # what it processes are scales that only a quantized cache has
        return getattr(layer.impl, "sinks", None) is None  # a kernel may keep a copy of the sinks
    if hasattr(layer, "process_weights_after_loading"):
        return False
    # On a CPU a linear layer's kernel may hold its own copy of the weight, in a closure.
    if getattr(getattr(layer, "cpu_linear", None), "__closure__", None) is not None:
        return False
    initial, _ = get_layerwise_info(layer).restore_metadata  # the parameters before any loading
    current = {n: p for n, p in layer.named_parameters(recurse=False) if n not in SKIP_TENSORS}
    return current.keys() == initial.keys() and all(
        current[name].shape == initial[name].shape and current[name].dtype == initial[name].dtype
        for name in current
    )
