"""A critic without a backbone: a value head on hidden states that the actor has computed.

It is a Hugging Face model of its own kind, so that a probe is made, saved, sharded and loaded as a
critic with a network is. Importing this module lets Transformers' Auto classes know it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from vapo.config.algorithm import AlgorithmConfig
from vapo.config.critic import ProbeCritic
from vapo.config.estimators import PoiseOptions
from vapo.errors import UserError
from vapo.functional.value_heads import probe_features


class ProbeModelConfig(PreTrainedConfig):
    """The config.json of a critic that is a probe of `num_states` layers of an actor.

    The actor has `num_actor_layers` layers with states of `state_size` channels.
    `actor_fingerprint` says which actor a saved probe was trained on; None: unknown. `hidden_size`
    is the number of inputs of the head. They are the states of all read layers, or with
    `num_hidden_layers` 1 the outputs of a hidden layer.
    """

    model_type = "vapo_probe"

    def __init__(
        self,
        *,
        num_states: int = 1,
        state_size: int = 1,
        num_actor_layers: int = 0,
        actor_fingerprint: str | None = None,
        hidden_size: int = 1,
        num_hidden_layers: int = 0,
        **options: Any,
    ) -> None:
        self.num_states, self.state_size = num_states, state_size
        self.num_actor_layers, self.actor_fingerprint = num_actor_layers, actor_fingerprint
        self.hidden_size, self.num_hidden_layers = hidden_size, num_hidden_layers
        super().__init__(**options)


class ProbeFeatures(nn.Module):
    """Turns the actor's states of a token into the features that a probe's head reads.

    It stands where other critics have a backbone. A hidden layer is one of its `layers`, so FSDP
    shards it as it shards a decoder layer.
    """

    def __init__(self, config: ProbeModelConfig) -> None:
        super().__init__()
        size = config.num_states * config.state_size
        hidden = (nn.Linear(size, config.hidden_size) for _ in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(hidden)

    def forward(self, states: Float[Tensor, "n L H"]) -> Float[Tensor, "n F"]:
        features = probe_features(states)
        for layer in self.layers:
            dtype = layer.get_parameter("weight").dtype
            features = nn.functional.gelu(layer(features.to(dtype)))
        return features


class ProbeForSequenceClassification(PreTrainedModel):
    """A critic that is a probe: a value head `score` on states that an actor has computed."""

    config_class = ProbeModelConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True

    def __init__(self, config: ProbeModelConfig) -> None:
        super().__init__(config)
        self.model = ProbeFeatures(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels or 1, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return an empty embedding: a probe reads no tokens."""
        return nn.Embedding(0, self.config.state_size)

    def gradient_checkpointing_enable(self, *args: Any, **options: Any) -> None:
        """Do nothing: the inputs of a probe's layers are no smaller than what the layers keep."""

    def empty_states(self, num: int, dtype: str) -> Float[Tensor, "n L H"]:
        """Return uninitialised states of `num` tokens, to count their memory."""
        shape = num, self.config.num_states, self.config.state_size
        return torch.empty(shape, dtype=getattr(torch, dtype))


AutoConfig.register(ProbeModelConfig.model_type, ProbeModelConfig)
AutoModelForSequenceClassification.register(ProbeModelConfig, ProbeForSequenceClassification)


def probe_config(model: PreTrainedConfig, path: str, critic: ProbeCritic) -> PreTrainedConfig:
    """Return the config of a probe that starts from the folder `path`, whose config is `model`.

    The folder has a saved probe, or an actor on whose states a new probe is made.

    Raises: UserError: the saved probe's hidden layer is not the config's, or the actor lacks a
        layer, or a layer is named twice.
    """
    probe = critic.probe
    if isinstance(model, ProbeModelConfig):
        size = model.hidden_size if model.num_hidden_layers else None
        if size != probe.hidden_size:
            has = f"a hidden layer of {size}" if size else "no hidden layer"
            raise UserError(
                f"{path}: its probe has {has}: set critic.probe.hidden_size={size or 'null'}, or "
                "critic.init=policy"
            )
        model.actor_fingerprint = None  # the run's own says what it trains on
        return model
    text: Any = model.get_text_config(decoder=True)
    num_layers = text.num_hidden_layers
    numbers = checked_layers(probe.layers, model, key="critic.probe.layers", path=path)
    if len(set(numbers)) < len(numbers):
        raise UserError(
            f"critic.probe.layers {probe.layers} names a layer of {path} twice: the actor's layer "
            f"{num_layers} is -1, {num_layers - 1} is -2, and so on; give each once"
        )
    return ProbeModelConfig(
        num_actor_layers=num_layers,
        num_states=len(probe.layers),
        state_size=text.hidden_size,
        hidden_size=probe.hidden_size or len(probe.layers) * text.hidden_size,
        num_hidden_layers=int(probe.hidden_size is not None),
        num_labels=1,
        name_or_path=path,
    )


def checked_layers(
    layers: Sequence[int], model: PreTrainedConfig, *, key: str, path: str = ""
) -> tuple[int, ...]:
    """Check that an actor has the layers that a config key names, and return their numbers.

    They are counted from 0, the embedding; the last layer has the number -1 (`layer_numbers`).

    Args:
        path: the actor's folder, for the error; if empty, it is taken from the actor's config.

    Raises: UserError: the actor has fewer layers.
    """
    num_layers = model.get_text_config(decoder=True).num_hidden_layers
    missing_layers = [layer for layer in layers if not -num_layers - 1 <= layer <= num_layers]
    if missing_layers:
        raise UserError(
            f"{key}: {path or model.name_or_path} has no layer {missing_layers[0]}; its layers are "
            f"0 (the embedding) to {num_layers}"
        )
    return layer_numbers(layers, num_layers)


def estimator_layers(
    algorithm: AlgorithmConfig, model: PreTrainedConfig, *, path: str = ""
) -> tuple[int, ...]:
    """Return the numbers of the actor's layers whose states the advantage estimator reads.

    They are counted from 0, the embedding; the last layer has the number -1. `model` is the actor's
    config, and `path` its folder, for the error.

    Raises: UserError: the actor has fewer layers.
    """
    key = "poise.layer" if isinstance(algorithm, PoiseOptions) else "estimator_reads_layers"
    return checked_layers(algorithm.read_layers, model, key=f"algorithm.{key}", path=path)


def layer_numbers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return each layer's number counted from 0, the embedding, but -1 for the last layer.

    A negative number in `layers` counts from the end, and -1 there is the last layer.
    """
    from_start = [n if n >= 0 else n + num_layers + 1 for n in layers]
    return tuple(-1 if n == num_layers else n for n in from_start)


def new_probe(config: ProbeModelConfig, dtype: str, seed: int) -> PreTrainedModel:
    """Make a new probe. Its hidden layer, if any, starts at random by the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ProbeForSequenceClassification(config).to(getattr(torch, dtype))
