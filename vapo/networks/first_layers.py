"""A backbone that ends early, where only the states of its first layers are needed."""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from vapo.system.private_attributes import with_modules


class Ending(nn.Module):
    """Replaces the first decoder layer that is not run, and keeps in `state` what it would read.

    Every other attribute is that of the replaced layer, because a backbone may read it.
    """

    state: Tensor

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a submodule: it is not run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        self.state = hidden_states
        return hidden_states


def has_plain_layers(backbone: PreTrainedModel) -> bool:
    """Whether a backbone's layers can be replaced by an `Ending`.

    It must have `layers`, as many as its config says, and each must return a state alone: an
    `Ending` does not return a tuple.
    """
    layers = getattr(backbone, "layers", None)
    num_layers = getattr(backbone.config, "num_hidden_layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != num_layers:
        return False
    return_types = (inspect.signature(type(layer).forward).return_annotation for layer in layers)
    return not any(str(return_type).startswith("tuple") for return_type in return_types)


def first_layers(backbone: PreTrainedModel, count: int) -> tuple[nn.Module, Ending]:
    """Return a view of the backbone that ends after `count` layers, and the `Ending` in it.

    After a forward pass of the view, `Ending.state` has the states after its last layer. The
    backbone itself, which a sampler may use meanwhile, is not changed.
    """
    maybe_install_capturing_hooks(backbone)  # once for all; a view would install its own
    layers = cast(nn.ModuleList, backbone.layers)
    ending = Ending(layers[count])
    return with_modules(backbone, layers=nn.ModuleList([*layers[:count], ending])), ending
