"""Load Hugging Face folders as live models: completely, checked, and made deterministic.

Only safetensors weights are loaded and no code from a model's folder runs. What this package
cannot train correctly is refused here, because later it would be silently wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vapo.config.critic import CriticConfig
from vapo.errors import UserError
from vapo.networks.adapters import AdapterModelConfig, new_adapters
from vapo.networks.attention_windows import attention_options
from vapo.networks.generation_files import read_generation_config
from vapo.networks.head_layers import begin_at_zero, begin_head, class_with_head
from vapo.networks.model_configs import (
    check_supported,
    quiet,
    read_model_config,
    read_value_config,
    refusals,
)
from vapo.networks.model_folders import check_model_folder
from vapo.networks.probe import ProbeModelConfig, new_probe
from vapo.networks.recurrent_layers import unbound_time_steps
from vapo.networks.saved_tokenizers import read_tokenizer
from vapo.networks.tied_embeddings import untie_as_saved
from vapo.networks.value_head import (
    LOGPROB_SCORE,
    ValueHead,
    has_classifier,
    plan_head,
    write_head,
)


def load_tokenizer(path: str, *, key: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub id, with an end token and a padding id.

    Without a padding token the end token's id fills padding: masks never derive from ids.

    Args:
        key: the config key to name in the error where there is no such folder.

    Raises:
        UserError: there is no such folder, one of its files is missing or damaged, the tokenizer
            has no end token, or the model's embedding lacks some of its ids.
    """
    try:
        config = read_model_config(path)
    except UserError as error:
        raise UserError(f"{key}: {error}" if key else str(error)) from None
    check_model_folder(path, has_tokenizer=True)
    with refusals(path, "tokenizer"), quiet():
        tokenizer = read_tokenizer(path)
        tokenizer("a b")  # some of its settings are first read here
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

    Dropout is 0 so that the first minibatch's ratio is 1: old and new log-probs then come from
    exactly the same network.

    Raises:
        UserError: the folder cannot be loaded, is not a causal language model, or computes its
            logits or its cache in a way that the trainer and the sampler do not reproduce.
    """
    config = read_model_config(path)
    architecture = _architecture(config)
    if architecture and not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise UserError(f"{path}: {architecture} is not a causal language model")
    check_supported(path, config)
    untie_as_saved(path, config)
    model, missing_names = load_weights(
        AutoModelForCausalLM, path, config, dtype, attn_implementation
    )
    _check_complete(path, missing_names)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise UserError(
            f"{path}: the output layer is not one matrix (bias, or another module); log-probs "
            "are computed from its weight alone, so this model is not supported yet"
        )
    remove_dropout(model)
    unbound_time_steps(model)
    return model


def load_value_model(
    path: str,
    *,
    dtype: str,
    attn_implementation: str,
    critic: CriticConfig | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Load a backbone with a head `score`, from a reward model, critic or causal-LM folder.

    A sequence-classification folder must bring its head; from any other folder the backbone is
    taken and the head starts at zero, so that every value is 0 before training. Dropout is 0.

    Args:
        critic: the config of the head and its start. None: the folder's head, or a scalar one.
        seed: seeds what starts at random: a probe's hidden layer, or the adapters' A.

    Raises:
        UserError: the folder cannot be loaded, or its head is not the one that is asked for.
    """
    config = read_value_config(path, critic)
    architecture = _architecture(config)
    has_head = has_classifier(config)
    if not has_head and isinstance(config, ProbeModelConfig | AdapterModelConfig):
        if isinstance(config, ProbeModelConfig):
            model: PreTrainedModel = new_probe(config, dtype, seed)
        else:
            model = new_adapters(config, seed)
        begin_head(model, plan_head(config, path, critic))
        return model
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
    model, missing_names = load_weights(auto, path, config, dtype, attn_implementation)
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear):
        raise UserError(f"{path}: {type(model).__name__} has no linear head named `score`")
    head_names = {f"score.{name}" for name, _ in score.named_parameters()}
    added_names = {name for name in missing_names if name.startswith(f"{LOGPROB_SCORE}.")}
    added_names |= missing_names & ({"score.bias"} if plan.adds_bias else set())
    _check_complete(
        path, missing_names - added_names - (set() if plan.keeps_weights else head_names)
    )
    if plan.keeps_weights:
        begin_at_zero(model, added_names)
    else:
        begin_head(model, plan)
    remove_dropout(model)
    unbound_time_steps(model)
    return model


# ---- reading ------------------------------------------------------------------------------


def load_weights(
    auto_class: Any, path: str, config: PreTrainedConfig, dtype: str, attn_implementation: str
) -> tuple[PreTrainedModel, set[str]]:
    """Load a model, and return it with the names of the weights that the folder lacks.

    `auto_class` is one of Transformers' Auto classes, or a model class. Missing weights are random.

    Raises: UserError: the weights cannot be loaded, have other shapes than the config says, or are
        not finite.
    """
    options = attention_options(path, config, attn_implementation)
    generation = read_generation_config(path, config)
    with refusals(path, "weights"), quiet():
        model, info = auto_class.from_pretrained(
            path,
            config=config,
            generation_config=generation,
            dtype=getattr(torch, dtype),
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **options,
        )
    _check_shapes(path, info["mismatched_keys"])
    _check_finite(path, model)
    return model, set(info["missing_keys"])


# ---- checking -----------------------------------------------------------------------------


def _architecture(config: PreTrainedConfig) -> str:
    return (config.architectures or [""])[0]


def _check_complete(path: str, missing_names: set[str]) -> None:
    if missing_names:
        names = ", ".join(sorted(missing_names)[:3])
        raise UserError(
            f"{path}: {len(missing_names)} weights are missing ({names}, ...) and would start at "
            "random; the folder is incomplete or of another architecture"
        )


def _check_shapes(path: str, mismatched: set[tuple[str, Any, Any]]) -> None:
    """Refuse a folder of which some weights have other shapes than config.json gives them.

    Transformers has made these weights at random instead. `mismatched` has for each its name, its
    shape in the folder, and its shape by config.json.
    """
    if mismatched:
        name, saved_shape, config_shape = min(mismatched)
        raise UserError(
            f"{path}: cannot load the weights: {len(mismatched)} have other shapes than "
            f"config.json gives them, as {name}: {list(saved_shape)} in the folder, "
            f"{list(config_shape)} by config.json; correct the file, or copy the folder again"
        )


def _check_finite(path: str, model: nn.Module) -> None:
    """Check that all weights are finite, without copying them."""
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


def remove_dropout(model: nn.Module) -> None:
    """Set the probability of every dropout module to 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
