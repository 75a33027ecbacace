"""Load Hugging Face folders as live models: completely, checked, and made deterministic.

Only safetensors weights are loaded and no code from a model's folder runs. What this package
cannot train correctly is refused here, because later it would be silently wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging as transformers_logging

from vapo.config.critic import CriticConfig
from vapo.errors import UserError
from vapo.networks.model_folders import check_model_folder, folder_with_config, local_folder
from vapo.networks.saved_tokenizers import read_tokenizer
from vapo.networks.value_head import (
    LOGPROB_SCORE,
    ValueHead,
    begin_head,
    begin_logprob_score,
    class_with_head,
    has_classifier,
    plan_head,
    write_head,
)

logger = logging.getLogger(__name__)

_LOADING_ERRORS = (OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError)
# Names under which architectures rescale or bend the logits after `lm_head`, and the value
# that changes nothing.
_LOGIT_TRANSFORMS = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
}


def load_tokenizer(path: str, *, key: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub id, with an end token and a padding id.

    Without a padding token the end token's id fills padding: masks never derive from ids.

    Args:
        key: the config key to name in the error where there is no such folder.

    Raises:
        UserError: no such folder, a file of it missing or damaged, no end token, or ids that
            the model's embedding does not have.
    """
    try:
        config = read_model_config(path)
    except UserError as error:
        raise UserError(f"{key}: {error}" if key else str(error)) from None
    check_model_folder(path, has_tokenizer=True)
    with refusals(path, "tokenizer"), quiet():
        tokenizer = read_tokenizer(path)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{path}: the tokenizer has no end token, so no response could finish; "
            "set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    num_ids = max(tokenizer.get_vocab().values()) + 1
    if vocab_size is not None and num_ids > vocab_size:
        raise UserError(
            f"{path}: the tokenizer has {num_ids} ids, the model's embedding only {vocab_size} "
            "rows; they do not belong together (or resize the embedding and save it)"
        )
    return tokenizer


def load_causal_lm(path: str, *, dtype: str, attn_implementation: str) -> PreTrainedModel:
    """Load a causal language model with every weight from the folder, and dropout 0.

    Dropout is 0 so that the first minibatch's ratio is 1: the old log-probs and the new ones
    then come from one and the same network.

    Raises:
        UserError: the folder cannot be loaded, is not a causal language model, or computes its
            logits or its cache in a way that the trainer and the sampler do not reproduce.
    """
    config = read_model_config(path)
    architecture = _architecture(config)
    if architecture and not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise UserError(f"{path}: {architecture} is not a causal language model")
    check_supported(path, config)
    model, missing = load_weights(AutoModelForCausalLM, path, config, dtype, attn_implementation)
    _check_complete(path, missing)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise UserError(
            f"{path}: the output layer is not one matrix (bias, or another module); log-probs "
            "are computed from its weight alone, so this model is not supported yet"
        )
    remove_dropout(model)
    return model


def load_value_model(
    path: str, *, dtype: str, attn_implementation: str, critic: CriticConfig | None = None
) -> PreTrainedModel:
    """Load a backbone with a head `score`, from a reward model, critic or causal-LM folder.

    A sequence-classification folder must bring its head; from any other folder the backbone is
    taken and the head starts at zero, so that every value is 0 before training. Dropout is 0.

    Args:
        critic: asks for a head, and how it starts; None: the folder's, else a scalar one.

    Raises:
        UserError: the folder cannot be loaded, or its head is not the one that is asked for.
    """
    config = read_value_config(path, critic)
    architecture = _architecture(config)
    has_head = has_classifier(config)
    if not has_head and not architecture.endswith(("ForCausalLM", "LMHeadModel", "Model")):
        raise UserError(
            f"{path}: a value model starts from a sequence classifier or a causal language "
            f"model, not from {architecture or 'a folder without architectures in config.json'}"
        )
    plan = plan_head(config, path, critic)
    if not has_head:
        config.num_labels = 1
    auto: Any = AutoModelForSequenceClassification
    if plan.keeps_weights and plan.head != ValueHead():
        with refusals(path, "model"), torch.device("meta"):
            plain = auto.from_config(config, trust_remote_code=False)
        auto = class_with_head(type(plain), plan.head)
        write_head(config, plan.head)
    model, missing = load_weights(auto, path, config, dtype, attn_implementation)
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear):
        raise UserError(f"{path}: {type(model).__name__} has no linear head named `score`")
    head = {f"score.{name}" for name, _ in score.named_parameters()}
    of_logprobs = {name for name in missing if name.startswith(f"{LOGPROB_SCORE}.")}
    _check_complete(path, missing - of_logprobs - (set() if plan.keeps_weights else head))
    if not plan.keeps_weights:
        begin_head(model, plan)
    elif of_logprobs:
        begin_logprob_score(model)
    remove_dropout(model)
    return model


# ---- reading ------------------------------------------------------------------------------


def read_model_config(path: str) -> PreTrainedConfig:
    folder_with_config(path)
    with refusals(path, "config.json"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    _remove_configured_dropout(path, config)
    return config


def read_value_config(path: str, critic: CriticConfig | None) -> PreTrainedConfig:
    """The config of a value model's folder, cut as the critic's options say."""
    config = read_model_config(path)
    keep_first_layers(config, path, critic)
    return config


def keep_first_layers(config: PreTrainedConfig, path: str, critic: CriticConfig | None) -> None:
    """Cut a backbone's config to its first `critic.layers` decoder layers, if it says so.

    Raises: UserError: the folder has fewer; or a head that was trained on the last layer's states.
    """
    if critic is None or critic.layers is None:
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
    text_config.num_hidden_layers = critic.layers
    if getattr(text_config, "layer_types", None):  # some architectures name each layer's kind
        text_config.layer_types = text_config.layer_types[: critic.layers]


def load_weights(
    auto_class: Any, path: str, config: PreTrainedConfig, dtype: str, attn_implementation: str
) -> tuple[PreTrainedModel, set[str]]:
    """The model, and the names of its weights that the folder does not have."""
    options: dict[str, Any] = {}
    if attn_implementation != "auto":
        options["attn_implementation"] = attn_implementation
    with refusals(path, "weights"), quiet():
        model, info = auto_class.from_pretrained(
            path,
            config=config,
            dtype=getattr(torch, dtype),
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    _check_finite(path, model)
    return model, set(info["missing_keys"])


@contextmanager
def refusals(path: str, what: str) -> Iterator[None]:
    """Turn every failure to load into one line of error."""
    try:
        yield
    except _LOADING_ERRORS as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        hint = "" if local_folder(path) else " (no such folder here, so it was read as a hub id)"
        if "safetensors" in reason or "model.bin" in reason:
            hint += "; weights must be safetensors, as model.save_pretrained writes them"
        raise UserError(f"{path}: cannot load the {what}{hint}: {reason}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the weight report and the progress bar: what matters is checked here."""
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


# ---- checking -----------------------------------------------------------------------------


def _architecture(config: PreTrainedConfig) -> str:
    return (config.architectures or [""])[0]


def _check_complete(path: str, missing: set[str]) -> None:
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise UserError(
            f"{path}: {len(missing)} weights are missing ({names}, ...) and would start at "
            "random; the folder is incomplete or of another architecture"
        )


def _check_finite(path: str, model: nn.Module) -> None:
    """One pass over the weights, which copies none."""
    bad = [
        name
        for name, weight in model.named_parameters()
        if weight.numel() and not all(bound.isfinite() for bound in torch.aminmax(weight.detach()))
    ]
    if bad:
        names = ", ".join(bad[:3]) + (", ..." if len(bad) > 3 else "")
        raise UserError(
            f"{path}: {len(bad)} weights are not finite numbers ({names}): the folder is damaged, "
            "or what was saved had diverged; give another model"
        )


def check_supported(path: str, config: PreTrainedConfig) -> None:
    text_config = config.get_text_config(decoder=True)
    for name, neutral in _LOGIT_TRANSFORMS.items():
        value = getattr(text_config, name, None)
        if value not in (None, neutral):
            raise UserError(
                f"{path}: {name} is {value}; log-probs are computed from the hidden states and "
                "lm_head alone, so this model is not supported yet"
            )
    with refusals(path, "attention cache"):
        layers = DynamicCache(config=config).layers
    if any(type(layer) is not DynamicLayer for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in layers})
        raise UserError(
            f"{path}: its cache has {', '.join(kinds)}; the sampler supports full attention in "
            "every layer, not sliding windows or recurrent layers yet"
        )


def _remove_configured_dropout(path: str, config: PreTrainedConfig) -> None:
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            is_dropout = "dropout" in name or name.endswith("pdrop")
            if is_dropout and isinstance(value, (int, float)) and value > 0:
                logger.info("%s: %s set from %s to 0", path, name, value)
                setattr(part, name, type(value)(0))


def remove_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
