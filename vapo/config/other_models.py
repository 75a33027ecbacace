"""A learning rate that a file gives for one model must not reach a much larger one unnoticed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo.config.layers import Layer, is_interpolation, show
from vapo.config.sources import WrittenRate
from vapo.errors import UserError

MOST_TIMES_LARGER = 10.0
"""Up to here the rate of one model is taken for another's."""
_PAPER = {"actor": "1e-6", "critic": "2e-6"}


def written_rates(layers: Sequence[Layer]) -> Iterator[WrittenRate]:
    """Each network's learning rate, if a layer gives one, with the model of that time."""
    states = _states(layers)
    for network in ("actor", "critic"):
        key = f"{network}.optimizer.lr"
        last = _last_to_set(layers, key)
        model = None if last is None else _model(states[last], network)
        if last is not None and model is not None:
            layer = layers[last]
            yield WrittenRate(network, layer.place(key), layer.name, show(layer.value(key)), model)


def check_learning_rates(config: Any) -> None:
    """Every written learning rate of a FitConfig is for its model, or for one of that size.

    A file that names a model and a rate says that they belong together. Where a later file, or
    the command line, replaces the model and not the rate, the rate is one for another model.
    That matters where the other one is larger: the size of a model that is not in a folder here
    is not known, and is taken for larger than one that is.

    Raises:
        UserError: names the rate, its file and line, and both models.
    """
    for rate in config.sources.rates:
        now = _model(_settings(config), rate.network)
        if now is None or _folder(now) == _folder(rate.model):
            continue
        if rate.network == "critic" and not config.algorithm.has_critic:
            continue
        before, size = _weight_bytes(rate.model), _weight_bytes(now)
        if not before or 0 < size <= MOST_TIMES_LARGER * before:
            continue
        key = f"{rate.network}.optimizer.lr"
        how = f"{size / before:,.0f} times as large" if size else "whose size is not known"
        raise UserError(
            f"{rate.place}: {key} {rate.value} was given for {rate.model}, and "
            f"the {rate.network} is now {now}, {how}: a rate for a small model destroys a large "
            f"one. Set {key} too (the paper's is {_PAPER[rate.network]}), or begin with a recipe "
            f"of conf/recipes in the place of {rate.file}"
        )


_KEYS = ("actor.path", "critic.init", "critic.reward_model_path")


def _states(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """The keys that name models, as they stand after each layer."""
    states, state = [], dict[str, Any]()
    for layer in layers:
        set_here = {key: layer.value(key) for key in _KEYS}
        state = state | {key: value for key, value in set_here.items() if value is not None}
        states.append(state)
    return states


def _settings(config: Any) -> dict[str, Any]:
    critic = config.critic
    return dict(zip(_KEYS, (config.actor.path, critic.init, critic.reward_model_path), strict=True))


def _last_to_set(layers: Sequence[Layer], key: str) -> int | None:
    places = [i for i, layer in enumerate(layers) if layer.value(key) is not None]
    return places[-1] if places else None


def _model(state: Mapping[str, Any], network: str) -> str | None:
    """The folder or hub id that the network starts from; None: not known from these keys."""
    actor, init, reward_model = (state.get(key) for key in _KEYS)
    model = actor
    if network == "critic" and init != "policy":
        model = reward_model if init in (None, "reward_model") else init
    return None if not isinstance(model, str) or is_interpolation(model) else model


def _weight_bytes(model: str) -> int:
    """Of a folder's weights; 0 for a model that is not here."""
    return sum(file.stat().st_size for file in _folder(model).glob("*.safetensors"))


def _folder(model: str) -> Path:
    """Where the loaders look for the model first; two spellings of a folder are the same."""
    return Path(os.path.expanduser(model))
