"""Load critics of other frameworks. A value head is recognised by its name in the weights.

The name is `score` in OpenRLHF, in verl's merged critics and in our own, `v_head.summary` in TRL
and in libraries that follow it, else `classifier` or `value_head`. A critic may also be an adapter
on a base model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from vapo.config.schema import TrainerConfig
from vapo.errors import UserError, about
from vapo.networks.head_layers import class_with_head
from vapo.networks.loading import load_value_model, load_weights, remove_dropout
from vapo.networks.model_configs import read_model_config, refusals
from vapo.networks.model_folders import check_critic_folder, weight_files
from vapo.networks.value_head import ValueHead, has_classifier, write_head
from vapo.system.installation import install_command
from vapo.system.libraries import pick_device

HEADS = ("score", "v_head.summary", "classifier", "value_head", "v_head")


def load_value_network(path: str) -> tuple[PreTrainedModel, str, str]:
    """Load a critic from a folder, and return (network, description, folder with the tokenizer).

    The network's head is named `score`. The description is a phrase for people. It names the
    architecture and the head, or the kind of adapter, its base model and where the head is from.
    The tokenizer's folder is `path`, or for an adapter the folder of its base model.

    Raises: UserError: no folder, no head with one output, or a pickle.
    """
    folder = check_critic_folder(path)
    if not (folder / "adapter_config.json").is_file():
        return *_with_head(path), path
    return *_with_adapter(folder), str(_adapter_config(folder).base_model_name_or_path)


# ---- heads -----------------------------------------------------------------------------------


def _with_head(path: str) -> tuple[PreTrainedModel, str]:
    config = read_model_config(path)
    architecture = (config.architectures or ["no architecture"])[0]
    saved_dtype = str(config.dtype or torch.float32).removeprefix("torch.")
    dtype = saved_dtype if pick_device(TrainerConfig()).type == "cuda" else "float32"
    if has_classifier(config):
        model = load_value_model(path, dtype=dtype, attn_implementation="auto")
        return model, f"sequence classifier ({architecture})"
    name, head = _head_of(Path(path).expanduser(), config)
    if head is None:
        raise UserError(
            f"{path}: no value head: {architecture} has no weights named "
            f"{', '.join(HEADS)}; is this the policy? A critic gives one number for each token"
        )
    return _backbone_with(path, config, head, dtype), f"{architecture} with the head `{name}`"


def _head_of(folder: Path, config: PreTrainedConfig) -> tuple[str, dict[str, Tensor] | None]:
    """Return the name of the value head in a folder's weights, and its tensors by their kind.

    The kinds are "weight" and, if the head has one, "bias". The result is ("", None) if the folder
    has no head.
    """
    prefix = getattr(config, "value_head_prefix", None)
    names = dict.fromkeys([*([prefix] if isinstance(prefix, str) else []), *HEADS])
    with refusals(str(folder), "head"):
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as weights:
                keys = set(weights.keys())
                for name in names:
                    if f"{name}.weight" in keys:
                        head = {
                            kind: weights.get_tensor(f"{name}.{kind}")
                            for kind in ("weight", "bias")
                            if f"{name}.{kind}" in keys
                        }
                        return name, head
    return "", None


def _backbone_with(
    path: str, config: PreTrainedConfig, head: Mapping[str, Tensor], dtype: str
) -> PreTrainedModel:
    """Load the folder's backbone, and give it a linear head `score` with the given weights.

    Args:
        head: "weight" -> tensor, and "bias" -> tensor if it has a bias.
    """
    shape = tuple(head["weight"].shape)
    if shape[0] != 1:
        raise UserError(f"{path}: its head has {shape[0]} outputs; a value is one")
    plan = ValueHead(has_bias="bias" in head)
    config.num_labels = 1
    auto: Any = AutoModelForSequenceClassification
    with refusals(path, "model"), torch.device("meta"):
        plain = auto.from_config(config, trust_remote_code=False)
    model_class = class_with_head(type(plain), plan) if plan.has_bias else type(plain)
    write_head(config, plan)
    model, missing_names = load_weights(model_class, path, config, dtype, "auto")
    if lacks := sorted(name for name in missing_names if not name.startswith("score.")):
        raise UserError(f"{path}: {len(lacks)} weights are missing ({', '.join(lacks[:3])}, ...)")
    score = model.get_submodule("score")
    with torch.no_grad():
        for name, weight in head.items():
            score.get_parameter(name).copy_(weight)
    remove_dropout(model)
    return model


# ---- adapters --------------------------------------------------------------------------------


def _adapter_config(folder: Path) -> Any:
    try:
        import peft
    except ImportError:
        raise UserError(f"an adapter needs peft: {install_command('lora')}") from None
    with refusals(str(folder), "adapter_config.json"):
        return peft.PeftConfig.from_peft_type(
            **json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        )


def _with_adapter(folder: Path) -> tuple[PreTrainedModel, str]:
    """Load an adapter's base model, merge the adapter into it, and return it with a description.

    The value head is the adapter's, or the base's if the adapter has none.
    """
    import peft

    config = _adapter_config(folder)
    base = str(config.base_model_name_or_path)
    weights = folder / "adapter_model.safetensors"
    head = _adapter_head(weights)
    with about(f"{folder}: its base"):
        base_folder = check_critic_folder(base)
        base_config = read_model_config(base)
        name, base_head = _head_of(base_folder, base_config)
    score_head = base_head if head is None else head
    if score_head is None:
        raise UserError(
            f"{folder}: neither the adapter nor its base {base} has a value head: it was not saved "
            "(modules_to_save=['score'] of peft keeps it)"
        )
    model = _backbone_with(base, base_config, score_head, "float32")
    with refusals(str(folder), "adapter"):
        state = _adapter_state(weights, model)
        config.modules_to_save, config.task_type, config.inference_mode = None, None, True
        wrapped: Any = peft.get_peft_model(model, config)
        unexpected_keys = peft.set_peft_model_state_dict(wrapped, state).unexpected_keys
    if unexpected_keys:
        raise UserError(
            f"{folder}: {len(unexpected_keys)} of the adapter's weights fit nowhere in its "
            f"base ({unexpected_keys[0]}, ...)"
        )
    merged = wrapped.merge_and_unload()
    where = "the adapter's own head" if head is not None else f"its base's head `{name}`"
    return merged, f"{config.peft_type.value} adapter on {base}, with {where}"


def _adapter_head(weights: Path) -> dict[str, Tensor] | None:
    """Return the value head in an adapter's weights: "weight" -> tensor, perhaps "bias" -> tensor.

    None if the adapter has no value head.
    """
    with safe_open(weights, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  (no mapping)
            name = key.removesuffix(".weight").removesuffix(".modules_to_save")
            if key.endswith(".weight") and name.endswith(tuple(f".{head}" for head in HEADS)):
                stem = key.removesuffix("weight")
                kinds = {"weight", "bias"} & {name.removeprefix(stem) for name in file.keys()}  # noqa: SIM118
                return {kind: file.get_tensor(stem + kind) for kind in kinds}
    return None


def _adapter_state(weights: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return an adapter's LoRA weights, named as for an adapter on a sequence classifier.

    Its value head is left out.
    """
    prefix = f"base_model.model.{model.base_model_prefix}."
    state = {}
    with safe_open(weights, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            if "lora_" not in key:
                continue
            # the adapter may have been trained on the backbone alone, as on an AutoModel
            is_bare = key.startswith("base_model.model.") and not key.startswith(prefix)
            name = prefix + key.removeprefix("base_model.model.") if is_bare else key
            state[name] = file.get_tensor(key)
    return state
