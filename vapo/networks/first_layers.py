"""A backbone that ends early: for states of its first layers the others need not run."""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from vapo.system.private_attributes import with_modules


class Ending(nn.Module):
    """Stands for the layer after the last one that is run, and keeps its input.

    What a backbone asks a layer about itself, the layer answers.
    """

    state: Tensor

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a child: nothing of it is run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        self.state = hidden_states
        return hidden_states


def has_plain_layers(backbone: PreTrainedModel) -> bool:
    """Whether it has `layers`, as many as its own config says, and each gives its state alone: an
    `Ending` could not stand for one that declares a tuple."""
    layers = getattr(backbone, "layers", None)
    num_layers = getattr(backbone.config, "num_hidden_layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != num_layers:
        return False
    return_types = (inspect.signature(type(layer).forward).return_annotation for layer in layers)
    return not any(str(return_type).startswith("tuple") for return_type in return_types)


def first_layers(backbone: PreTrainedModel, count: int) -> tuple[nn.Module, Ending]:
    """A view of the backbone that ends after so many layers, and what has their states then.

    The backbone itself, which a sampler may use meanwhile, is not changed.
    """
    maybe_install_capturing_hooks(backbone)  # once for all; a view would install its own
    layers = cast(nn.ModuleList, backbone.layers)
    ending = Ending(layers[count])
    return with_modules(backbone, layers=nn.ModuleList([*layers[:count], ending])), ending
