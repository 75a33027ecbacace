"""The Transformers engine on a copy of the weights: it can sample while the actor is trained."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.config.networks import LoraConfig
from vapo.networks.lora import plain_copy
from vapo.rollouts.engines.transformers.mixed_weights import mix_weights
from vapo.rollouts.engines.transformers.sampler import TransformersSampler


class DetachedTransformersSampler(TransformersSampler):
    """A `TransformersSampler` whose weights are those of the last `sync`, at first the actor's.

    It costs the memory of one more actor, without gradients and optimizer. With a `mixed_dtype` it
    computes as a trainer does in mixed precision of that dtype, and so are most of its weights.
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
        """Copy the actor's weights, between two steps of what another thread samples.

        Raises:
            ValueError: the names are not those of the engine's own weights, each of them once.
        """
        with self._next, self._weights_in_use:
            take_weights(self._model, weights)


def take_weights(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights into the model.

    Raises:
        ValueError: the names are not those of the model's own weights, each of them once.
    """
    left = model.state_dict()
    for name, tensor in weights:
        if name not in left:
            raise ValueError(f"the engine has no weight {name}, or got it twice")
        left.pop(name).copy_(tensor)
    if left:
        raise ValueError(f"these weights of the engine were not synced: {', '.join(left)}")
