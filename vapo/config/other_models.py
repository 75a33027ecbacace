"""Check that a learning rate which a file gives for one model is not used for a much larger one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vapo.config.layers import Layer, is_interpolation, show
from vapo.config.sources import WrittenRate
from vapo.errors import UserError

_KEYS = ("actor.path", "critic.init", "critic.reward_model_path")
MOST_TIMES_LARGER = 10.0
"""A model up to this many times as large may be trained with the learning rate of another."""
_PAPER = {"actor": "1e-6", "critic": "2e-6"}


def written_rates(layers: Sequence[Layer]) -> Iterator[WrittenRate]:
    """Yield the learning rate that was set last for each network, and the model it was set for.

    This model is the one that the rate's layer names, or the last layer before it that names one.
    """
    for network in ("actor", "critic"):
        key = f"{network}.optimizer.lr"
        giving = [index for index, layer in enumerate(layers) if layer.value(key) is not None]
        if not giving:
            continue
        layer, layers_until = layers[giving[-1]], layers[giving[-1] :: -1]
        of_models = [
            [value for earlier in layers_until if (value := earlier.value(k)) is not None]
            for k in _KEYS
        ]
        model = _model(network, *(next(iter(values), None) for values in of_models))
        if model is not None:
            yield WrittenRate(network, layer.place(key), layer.name, show(layer.value(key)), model)


def check_learning_rates(config: Any) -> None:
    """Check that no learning rate was given for a much smaller model than the one that is trained.

    A file that names a model and a rate says that they belong together. Where a later file, or the
    command line, replaces the model but not the rate, the rate was given for another model. A model
    that is in no local folder has an unknown size and counts as larger.

    Raises: UserError: names the rate, its file and line, and both models.
    """
    critic = config.critic
    for rate in config.sources.rates:
        now = _model(rate.network, config.actor.path, critic.init, critic.reward_model_path)
        if now is None or _folder(now) == _folder(rate.model):
            continue
        if rate.network == "critic" and (not config.algorithm.has_critic or critic.reads_actor):
            continue  # a probe does not read it
        size_then, size = _weight_bytes(rate.model), _weight_bytes(now)
        if not size_then or 0 < size <= MOST_TIMES_LARGER * size_then:
            continue
        key = f"{rate.network}.optimizer.lr"
        how = f"{size / size_then:,.0f} times as large" if size else "whose size is not known"
        raise UserError(
            f"{rate.place}: {key} {rate.value} was given for {rate.model}, and "
            f"the {rate.network} is now {now}, {how}: a rate for a small model destroys a large "
            f"one. Set {key} too (the paper's is {_PAPER[rate.network]}), or begin with a recipe "
            f"of conf/recipes in the place of {rate.file}"
        )


def _model(network: str, actor: Any, init: Any, reward_model: Any) -> str | None:
    """Return the folder or hub id that the network starts from; None if it is not known."""
    model = actor
    if network == "critic" and init != "policy":
        model = reward_model if init in (None, "reward_model") else init
    return None if not isinstance(model, str) or is_interpolation(model) else model


def _weight_bytes(model: str) -> int:
    """Return the bytes of a model's weights; 0 if the model is in no local folder."""
    return sum(file.stat().st_size for file in _folder(model).glob("*.safetensors"))


def _folder(model: str) -> Path:
    """Return the local path of a model; that of a hub id does not exist, as a rule."""
    return Path(os.path.expanduser(model))
