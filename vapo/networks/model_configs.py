"""Read the config.json of a Hugging Face folder, and refuse a model that would be silently wrong.

No code from a model's folder runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from vapo.config.critic import CriticConfig, ProbeCritic
from vapo.errors import UserError
from vapo.networks.adapters import AdapterModelConfig, adapters_network_config
from vapo.networks.attention_windows import ATTENTION_LAYERS, check_windows
from vapo.networks.classifiers import register_classifier
from vapo.networks.config_files import CONFIG_FILE, check_config_file
from vapo.networks.experts import turn_off_router_loss
from vapo.networks.logit_transforms import logit_transform
from vapo.networks.model_folders import folder_with_config, local_folder
from vapo.networks.probe import ProbeModelConfig, probe_config
from vapo.networks.recurrent_layers import (
    cache_layers,
    check_layer_kinds,
    check_recurrent,
    is_recurrent,
)
from vapo.networks.value_head import has_classifier
from vapo.system.private_attributes import causal_lm_class

logger = logging.getLogger(__name__)

_CLEAR_ERRORS = (OSError, ValueError, RuntimeError, ImportError, SafetensorError)
"""Errors whose text alone says what is wrong. For others the message adds the class's name."""
_WITH_IMAGES = "ForConditionalGeneration"


def read_model_config(path: str) -> PreTrainedConfig:
    """Read the config of a model's folder or hub id, and set its dropout to 0.

    Raises: UserError: there is no config, or it has an entry that no supported model has.
    """
    folder = folder_with_config(path)
    with refusals(path, "config.json"):
        if folder is None:
            check_config_file(Path(cached_file(path, CONFIG_FILE) or ""))
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        parts = (config, config.get_text_config(), config.get_text_config(decoder=True))
    if not all(isinstance(part, PreTrainedConfig) for part in parts):
        raise UserError(
            f"{path}/{CONFIG_FILE}: {type(config).__name__} has no part that describes a model of "
            "text, as the file has (text_config, decoder or generator): take it out"
        )
    config = _part_for_text(config)
    check_windows(path, config.get_text_config(decoder=True))
    check_layer_kinds(path, config.get_text_config(decoder=True))
    _remove_configured_dropout(path, config)
    turn_off_router_loss(config)
    config.return_dict = True  # what a model returns is read by field
    return config


def _part_for_text(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the text model's part of the config of a model that reads images as well (Qwen3.5).

    Transformers must have a causal language model of the text alone. The weights for images are
    then not read. Every other config is returned as it is.
    """
    text = config.get_text_config(decoder=True)
    name, _ = causal_lm_class(text)
    architecture = (config.architectures or [""])[0]
    has_images = architecture.endswith(_WITH_IMAGES)
    if text is config or not has_images or name != causal_lm_class(config)[0]:
        return config
    text.architectures, text.name_or_path = [name], config.name_or_path
    return text


def read_value_config(path: str, critic: CriticConfig | None) -> PreTrainedConfig:
    """Read the config of a folder, and return that of the value model that starts from it.

    If `critic` is None, it is a reward model's. Raises UserError if the folder does not fit.
    """
    return as_critic(read_model_config(path), path, critic)


def as_critic(config: PreTrainedConfig, path: str, critic: CriticConfig | None) -> PreTrainedConfig:
    """Return the config of the critic that starts from the folder `path` with this `config`.

    A critic with a network keeps its first `critic.layers` layers. A probe or adapters have a
    config of their own kind. If `critic` is None, the folder is that of a reward model, and its
    config is returned as it is.

    Raises: UserError: the folder does not fit the critic's options. Without a critic: the folder
        has a critic that reads an actor's states, not a text.
    """
    register_classifier(config)
    folder_kind = saved_kind(config)
    if critic is None:
        if folder_kind in ("probe", "adapters"):
            raise UserError(
                f"{path} cannot be a reward model: its value head reads the hidden states of an "
                f"actor (critic.kind {folder_kind}), not a text"
            )
        return config
    if folder_kind is not None and folder_kind != critic.kind:
        description = _KINDS[folder_kind]
        raise UserError(
            f"{path}: its critic is {description}, and critic.kind is {critic.kind}: set "
            f"critic.kind={folder_kind}, or critic.init=policy"
        )
    keep_first_layers(config, path, critic)
    if isinstance(critic, ProbeCritic):
        return probe_config(config, path, critic)
    if critic.kind == "adapters":
        assert critic.lora is not None, "a rule: adapters have a rank"
        return adapters_network_config(config, path, critic.lora)
    return config


_KINDS = {
    "network": "a network",
    "probe": "a probe of an actor's states",
    "adapters": "adapters on an actor's base",
}


def saved_kind(config: PreTrainedConfig) -> str | None:
    """Return the kind of critic in a folder; None: the folder has no head."""
    if not has_classifier(config):
        return None
    kinds = {ProbeModelConfig: "probe", AdapterModelConfig: "adapters"}
    return kinds.get(type(config), "network")


def keep_first_layers(config: PreTrainedConfig, path: str, critic: CriticConfig) -> None:
    """Cut a backbone's config to its first `critic.layers` decoder layers, unless that is None.

    Raises: UserError: the folder has fewer layers, or its head would be kept and was trained on the
        states of its last layer.
    """
    if critic.layers is None:
        return
    text_config: Any = config.get_text_config()
    if critic.layers > text_config.num_hidden_layers:
        raise UserError(
            f"critic.layers {critic.layers} is more than the {text_config.num_hidden_layers} "
            f"decoder layers of {path}: give fewer, or null for all"
        )
    is_cut = critic.layers < text_config.num_hidden_layers
    if is_cut and critic.head.start == "as_loaded" and has_classifier(config):
        raise UserError(
            f"critic.layers {critic.layers} would put the value head of {path} on the states of a "
            "layer that it was not trained on: set critic.head.start=first_batch or mean_reward, "
            "which begin a new one, or critic.init=policy"
        )
    cut_layers(config, critic.layers)


def cut_layers(config: PreTrainedConfig, count: int) -> None:
    """Change a config so that the model ends after its first `count` decoder layers."""
    text: Any = config.get_text_config(decoder=True)
    num_layers = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        is_for_layers = "layer" in name and isinstance(value, list | tuple)
        if is_for_layers and len(value) == num_layers:  # it has an entry for each layer
            setattr(text, name, value[:count])
    text.num_hidden_layers = count


@contextmanager
def refusals(path: str, part: str) -> Iterator[None]:
    """Turn every error of a library that loads a part of a model's folder into a UserError.

    Args:
        part: what is loaded, for the message.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a config's numbers reach any line of a model's code
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        says_more = lines and lines[0].endswith(":")
        reason = f"{' '.join(lines[: 2 if says_more else 1]) or repr(error):.400}"
        if not isinstance(error, _CLEAR_ERRORS):
            reason = f"{type(error).__name__}: {reason}"
        hint = "" if local_folder(path) else " (no such folder here, so it was read as a hub id)"
        if "safetensors" in reason or "model.bin" in reason:
            hint += "; weights must be safetensors, as model.save_pretrained writes them"
        raise UserError(f"{path}: cannot load the {part}{hint}: {reason}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Transformers' weight report and progress bar; this package checks what matters."""
    verbosity = transformers_logging.get_verbosity()
    had_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bar:
            transformers_logging.enable_progress_bar()


def check_supported(path: str, config: PreTrainedConfig) -> None:
    """Check that trainer and sampler can compute a causal language model.

    Raises: UserError: its logits or its cache are of an unsupported kind.
    """
    logit_transform(path, config)
    with refusals(path, "attention cache"):
        layers = cache_layers(config)
    supported = [
        layer for layer in layers if is_recurrent(layer) or type(layer) in ATTENTION_LAYERS
    ]
    if unsupported_names := {type(layer).__name__ for layer in layers if layer not in supported}:
        raise UserError(
            f"{path}: its cache has {', '.join(sorted(unsupported_names))}; the sampler supports "
            "full attention, sliding windows and recurrent layers: take a model with these alone, "
            "as Qwen3, Qwen3.5, Gemma 3 or Llama 3"
        )
    check_recurrent(path, config, layers)


def _remove_configured_dropout(path: str, config: PreTrainedConfig) -> None:
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            is_dropout = "dropout" in name or name.endswith("pdrop")
            if is_dropout and isinstance(value, (int, float)) and value > 0:
                logger.info("%s: %s set from %s to 0", path, name, value)
                setattr(part, name, type(value)(0))
