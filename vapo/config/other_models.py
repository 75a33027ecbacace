"""A learning rate that a file gives for one model must not reach a much larger one unnoticed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo.config.layers import Layer, is_interpolation, show
from vapo.config.schema import FitConfig
from vapo.errors import UserError

MOST_TIMES_LARGER = 10.0
"""Up to here the rate of one model is taken for another's."""
_PAPER = {"actor": "1e-6", "critic": "2e-6"}


def check_learning_rates(config: FitConfig, layers: Sequence[Layer]) -> None:
    """Every written learning rate is for the model that it trains, or for one of its size.

    A file that names a model and a rate says that they belong together. Where a later file, or
    the command line, replaces the model and not the rate, the rate is one for another model.
    That matters where the other one is larger: the size of a model that is not in a folder here
    is not known, and is taken for larger than one that is.

    Raises:
        UserError: names the rate, its file and line, and both models.
    """
    networks = ["actor", "critic"] if config.algorithm.has_critic else ["actor"]
    for network in networks:
        key = f"{network}.optimizer.lr"
        states, last = _states(layers), _last_to_set(layers, key)
        if last is None:
            continue
        written_for, now = _model(states[last], network), _model(_settings(config), network)
        if written_for is None or now is None or written_for == now:
            continue
        before, size = _weight_bytes(written_for), _weight_bytes(now)
        if not before or 0 < size <= MOST_TIMES_LARGER * before:
            continue
        layer = layers[last]
        how = f"{size / before:,.0f} times as large" if size else "whose size is not known"
        raise UserError(
            f"{layer.place(key)}: {key} {show(layer.value(key))} was given for {written_for}, and "
            f"the {network} is now {now}, {how}: a rate for a small model destroys a large one. "
            f"Set {key} too (the paper's is {_PAPER[network]}), or begin with a recipe of "
            f"conf/recipes instead of {layer.name}"
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


def _settings(config: FitConfig) -> dict[str, Any]:
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
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
