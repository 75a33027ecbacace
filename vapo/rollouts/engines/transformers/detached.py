"""The Transformers engine on a copy of the weights: it can sample while the actor is trained."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.config.networks import LoraConfig
from vapo.networks.lora import plain_copy
from vapo.rollouts.engines.transformers.sampler import TransformersSampler


def mix_weights(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Round the weights of a model's linear layers to `dtype` in place, and return the model.

    It is for sampling under autocast.
    Autocast rounds them whenever it enters a layer: once in a training step, but for sampling once
    a token. A copy that holds them rounded gives the same numbers. Embeddings, norms and the output
    layer keep their dtype: autocast computes embeddings and norms in float32, and trainer and
    engine do so for the output layer.
    """
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            module.to(dtype)
    return model


class DetachedTransformersSampler(TransformersSampler):
    """A `TransformersSampler` whose weights are those of the last `sync`, at first the actor's.

    It costs the memory of one more actor, without gradients and optimizer. With a `mixed_dtype` it
    computes as a trainer does in mixed precision of that dtype, which most of its weights have.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        lora: LoraConfig | None = None,
        mixed_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        copy = plain_copy(model, lora)
        if mixed_dtype is not None:
            copy = mix_weights(copy, mixed_dtype)
        super().__init__(copy, tokenizer, **options)
        self._mixed_dtype = mixed_dtype

    def _computing(self) -> AbstractContextManager[object]:
        dtype = self._mixed_dtype
        return torch.autocast(self._device.type, dtype=dtype, enabled=dtype is not None)

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the actor's weights into the engine's; another thread may sample meanwhile.

        Raises: ValueError: the names are not those of the engine's weights, each exactly once.
        """
        with self._next, self._weights_in_use:
            remaining_weights = self._model.state_dict()
            for name, tensor in weights:
                if name not in remaining_weights:
                    raise ValueError(f"the engine has no weight {name}, or got it twice")
                remaining_weights.pop(name).copy_(tensor)
            if remaining_weights:
                names = ", ".join(remaining_weights)
                raise ValueError(f"these weights of the engine were not synced: {names}")
