"""A model's weights under the names of its folder, which are not always those in memory.

Transformers holds all experts of a layer in one tensor, and a folder may have each on its own; an
engine reads the folder's names.
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
    """Yield a model's weights, which come in the order of its state dict, as `save_pretrained`
    would write them.

    No more than a layer's are held at a time: what becomes one tensor, or several, is of a layer.
    """
    layer: str | None = None
    held: dict[str, Tensor] = {}
    for name, tensor in weights:
        match = _LAYER.search(name)
        number = None if match is None else match[1]
        if number is None or number != layer:
            yield from revert_weight_conversion(model, held).items()
            held = {}
        layer = number
        held[name] = tensor
    yield from revert_weight_conversion(model, held).items()
