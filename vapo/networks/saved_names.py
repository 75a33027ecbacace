"""Give a model's weights the names of its folder, which may differ from those in memory.

Transformers holds all experts of a layer in one tensor, while a folder may have a tensor for each
expert. An engine reads the names of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def under_saved_names(
    model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights by name as `save_pretrained` would write them.

    The weights of one layer at most are held at a time, since tensors are split and joined within
    a layer only.

    Args:
        weights: the model's weights in the order of its state dict.
    """
    layer: str | None = None
    layer_weights: dict[str, Tensor] = {}
    for name, tensor in weights:
        match = _LAYER.search(name)
        number = None if match is None else match[1]
        if number is None or number != layer:
            yield from revert_weight_conversion(model, layer_weights).items()
            layer_weights = {}
        layer = number
        layer_weights[name] = tensor
    yield from revert_weight_conversion(model, layer_weights).items()
