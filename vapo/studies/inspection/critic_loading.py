"""Others' critics as live models: the head is found by its name in the weights.

It is `score` in OpenRLHF, in verl's critic once it is merged and in our own, `v_head.summary` in
TRL and what took that over, else `classifier` or `value_head`; or an adapter stands on a base.
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
    """A network with a head `score`; what the folder is; and the folder that may have a tokenizer.

    Raises: UserError: no folder, no head that gives one number, or a pickle.
    """
    folder = check_critic_folder(path)
    if not (folder / "adapter_config.json").is_file():
        return *_with_head(path), path
    return *_with_adapter(folder), str(_adapter_config(folder).base_model_name_or_path)


# ---- heads -----------------------------------------------------------------------------------


def _with_head(path: str) -> tuple[PreTrainedModel, str]:
    config = read_model_config(path)
    architecture = (config.architectures or ["no architecture"])[0]
    own_dtype = str(config.dtype or torch.float32).removeprefix("torch.")
    dtype = own_dtype if pick_device(TrainerConfig()).type == "cuda" else "float32"
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
    """The name of the folder's head, and its weight and bias."""
    own = getattr(config, "value_head_prefix", None)
    names = dict.fromkeys([*([own] if isinstance(own, str) else []), *HEADS])
    with refusals(str(folder), "head"):
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as weights:
                keys = set(weights.keys())
                for name in names:
                    if f"{name}.weight" in keys:
                        parts = ("weight", "bias")
                        head = {
                            part: weights.get_tensor(f"{name}.{part}")
                            for part in parts
                            if f"{name}.{part}" in keys
                        }
                        return name, head
    return "", None


def _backbone_with(
    path: str, config: PreTrainedConfig, head: Mapping[str, Tensor], dtype: str
) -> PreTrainedModel:
    """The folder's backbone with a linear head `score` of these weights."""
    shape = tuple(head["weight"].shape)
    if shape[0] != 1:
        raise UserError(f"{path}: its head has {shape[0]} outputs; a value is one")
    plan = ValueHead(has_bias="bias" in head)
    config.num_labels = 1
    auto: Any = AutoModelForSequenceClassification
    with refusals(path, "model"), torch.device("meta"):
        plain = auto.from_config(config, trust_remote_code=False)
    made = class_with_head(type(plain), plan) if plan.has_bias else type(plain)
    write_head(config, plan)
    model, missing = load_weights(made, path, config, dtype, "auto")
    if lacks := sorted(name for name in missing if not name.startswith("score.")):
        raise UserError(f"{path}: {len(lacks)} weights are missing ({', '.join(lacks[:3])}, ...)")
    score = model.get_submodule("score")
    with torch.no_grad():
        for part, weight in head.items():
            score.get_parameter(part).copy_(weight)
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
    """The base with the adapter merged into it, and the head that either of them has."""
    import peft

    config = _adapter_config(folder)
    base = str(config.base_model_name_or_path)
    weights = folder / "adapter_model.safetensors"
    head = _adapter_head(weights)
    with about(f"{folder}: its base"):
        base_folder = check_critic_folder(base)
        base_config = read_model_config(base)
        name, own = _head_of(base_folder, base_config)
    found = own if head is None else head
    if found is None:
        raise UserError(
            f"{folder}: neither the adapter nor its base {base} has a value head: it was not saved "
            "(modules_to_save=['score'] of peft keeps it)"
        )
    model = _backbone_with(base, base_config, found, "float32")
    with refusals(str(folder), "adapter"):
        state = _renamed(weights, model)
        config.modules_to_save, config.task_type, config.inference_mode = None, None, True
        wrapped: Any = peft.get_peft_model(model, config)
        left = peft.set_peft_model_state_dict(wrapped, state)
    if left.unexpected_keys:
        raise UserError(
            f"{folder}: {len(left.unexpected_keys)} of the adapter's weights fit nowhere in its "
            f"base ({left.unexpected_keys[0]}, ...)"
        )
    merged = wrapped.merge_and_unload()
    where = "the adapter's own head" if head is not None else f"its base's head `{name}`"
    return merged, f"{config.peft_type.value} adapter on {base}, with {where}"


def _adapter_head(weights: Path) -> dict[str, Tensor] | None:
    with safe_open(weights, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  (no mapping)
            name = key.removesuffix(".weight").removesuffix(".modules_to_save")
            if key.endswith(".weight") and name.endswith(tuple(f".{head}" for head in HEADS)):
                stem = key.removesuffix("weight")
                parts = {"weight", "bias"} & {name.removeprefix(stem) for name in file.keys()}  # noqa: SIM118
                return {part: file.get_tensor(stem + part) for part in parts}
    return None


def _renamed(weights: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapter's own weights, without a head, under the names of a sequence classifier."""
    prefix = f"base_model.model.{model.base_model_prefix}."
    found = {}
    with safe_open(weights, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            if "lora_" not in key:
                continue
            # of an adapter on the backbone alone, as on an AutoModel
            bare = key.startswith("base_model.model.") and not key.startswith(prefix)
            found[prefix + key.removeprefix("base_model.model.") if bare else key] = (
                file.get_tensor(key)
            )
    return found
