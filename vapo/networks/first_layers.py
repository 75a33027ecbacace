"""A backbone that ends early: for states of its first layers the others need not run."""

from __future__ import annotations

from copy import copy
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from vapo.system.private_attributes import with_modules


class Ending(nn.Module):
    """Stands for the layer after the last one that is run, and keeps its input."""

    state: Tensor

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        self.state = hidden_states
        return hidden_states


def has_plain_layers(backbone: PreTrainedModel) -> bool:
    """Whether it calls `layers` one after another, as many as its own config says."""
    layers = getattr(backbone, "layers", None)
    num_layers = getattr(backbone.config, "num_hidden_layers", None)
    return isinstance(layers, nn.ModuleList) and len(layers) == num_layers


def first_layers(backbone: PreTrainedModel, count: int) -> tuple[nn.Module, Ending]:
    """A view of the backbone that ends after so many layers, and what has their states then.

    The backbone itself, which a sampler may use meanwhile, is not changed.
    """
    maybe_install_capturing_hooks(backbone)  # once for all; a view would install its own
    layers, ending = cast(nn.ModuleList, backbone.layers), Ending()
    view: Any = with_modules(backbone, layers=nn.ModuleList([*layers[:count], ending]))
    view.config = copy(backbone.config)
    view.config.num_hidden_layers = count + 1
    return view, ending
