"""Reads a checkpoint's contents without a Trainer, and checks before anything is loaded that it
fits the model which a config describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.serialization import get_unsafe_globals_in_checkpoint

from vapo.config import FitConfig
from vapo.config.loading import from_yaml
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor
from vapo.networks.build import choose_trained
from vapo.networks.critic_folders import critic_path, critic_start
from vapo.networks.lora import add_adapters, merge_adapters
from vapo.networks.meta_device import empty_model, empty_value_model
from vapo.networks.own_head import put_own_head
from vapo.networks.value_head import ValueHead, configured_head
from vapo.runs.manifests import SHARDS_NAME, STATE_NAME, Manifest, is_sharded, verify
from vapo.runs.shard_index import read_index

_SHOWN = 3
_MEMBERS = "critic.members."


def read_checkpoint(path: Path, *, verified: bool = False) -> dict[str, Any]:
    """Return a checkpoint's contents. If it is sharded, the optimizers are left out.

    Files hold tensors and plain values only, never pickled objects; the index of shards is read by
    `shard_index`. `verified` says that the files were already compared with their checksums.

    Raises: UserError: the checkpoint is missing, damaged or not one of ours.
    """
    if not path.exists():
        raise UserError(f"no checkpoint {path}")
    if not verified:
        verify(path)
    check_state(path)
    try:
        sharded = is_sharded(path)
        contents = torch.load(_state_file(path), map_location="cpu", weights_only=True)
        if sharded:
            contents["state_dict"] = _read_shards(path)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path} is not a readable checkpoint: {error}") from error
    parts = contents if isinstance(contents, dict) else {}
    has_both = isinstance(parts.get("config"), str) and isinstance(parts.get("state_dict"), dict)
    if not has_both:
        raise UserError(f"{path} is not a checkpoint of `vapo fit`: it has no config and weights")
    return contents


def check_state(checkpoint: Path) -> None:
    """Check that the file which Lightning and torch will read cannot run code. No tensor is read.

    Raises: UserError: the file cannot be read, or names something that could run code.
    """
    file = _state_file(checkpoint)
    try:
        names = get_unsafe_globals_in_checkpoint(file)
    except Exception as error:  # whatever a pickle that was made up can lead to
        reason = str(error).partition("\n")[0]
        raise UserError(f"{checkpoint} is not a readable checkpoint: {reason}") from error
    if names:
        raise UserError(
            f"{file} is not read, because it could run code: it names {names[0]}, and vapo writes "
            "tensors and plain values alone; resume from another checkpoint, or ask whoever made "
            "it for one that is whole"
        )


def _state_file(checkpoint: Path) -> Path:
    return checkpoint / (SHARDS_NAME if is_sharded(checkpoint) else STATE_NAME)


def _read_shards(folder: Path) -> dict[str, Tensor]:
    """Return the whole weights by name, put together from all shards in a folder."""
    index, prefix = read_index(folder), "state_dict."
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    load(weights, storage_reader=FileSystemReader(folder), no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}


def network_state(contents: dict[str, Any], network: str, *, member: int = 0) -> dict[str, Tensor]:
    """Return the weights of `actor` or `critic`, with parameter names of its Hugging Face model.

    Adapters are merged. If there are several critics, `member` chooses one of them.

    Raises: UserError: the checkpoint has no such network.
    """
    config = from_yaml(FitConfig, contents["config"], source="the checkpoint's config")
    is_one = network == "actor" or config.critic.count == 1
    prefix = f"{network}.model." if is_one else f"{network}.members.{member}.model."
    state = {
        name.removeprefix(prefix): tensor
        for name, tensor in contents["state_dict"].items()
        if name.startswith(prefix)
    }
    if not state:
        raise UserError(f"the checkpoint has no {network}; a critic-free run has only an actor")
    return dict(merge_adapters(state.items(), getattr(config, network).lora))


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's contents, as `read_checkpoint` returns them, and its path."""

    path: Path
    contents: dict[str, Any]

    def fill(self, model: nn.Module, network: str, start: str, *, member: int = 0) -> None:
        """Load the weights of `actor` or `critic` into a model, which was read from `start`.

        If there are several critics, `member` chooses one of them.

        Raises: UserError: the checkpoint does not have the network, or it is of another
            architecture.
        """
        try:
            model.load_state_dict(network_state(self.contents, network, member=member))
        except UserError as error:
            raise UserError(f"{self.path}: {error}; score it with its run's own config") from None
        except RuntimeError:
            state = network_state(self.contents, network, member=member)
            model_shapes, saved_shapes = (
                {name: str(list(tensor.shape)) for name, tensor in weights.items()}
                for weights in (model.state_dict(), state)
            )
            raise UserError(
                f"{self.path}: its {network} does not fit {start}, which is another model: it has "
                f"{_differences(model_shapes, saved_shapes)}; score it with its run's own config"
            ) from None


def check_compatible(manifest: Manifest, config: FitConfig, *, name: str) -> None:
    """Check that a checkpoint is of the config's model. `name` names the checkpoint in messages.

    Raises: UserError: the critic, adapters, parameters, their shapes or dtypes differ; it names
        which.
    """
    has_critic = any(key.startswith("critic.") for key in manifest.parameters)
    if has_critic != config.algorithm.has_critic:
        raise UserError(
            f"{name} has {'a' if has_critic else 'no'} critic, and this config has "
            f"{'one' if config.algorithm.has_critic else 'none'} (algorithm.advantage_estimator "
            f"is {config.algorithm.advantage_estimator})"
        )
    options = config.actor
    for network, saved_lora in (("actor", manifest.lora), ("critic", manifest.critic_lora)):
        configured_lora = adapter_options(config, network)
        if saved_lora != configured_lora:
            raise UserError(
                f"{name} has {_adapters(saved_lora)}, and {network}.lora asks for "
                f"{_adapters(configured_lora)}: set it as the run had it, or export the "
                f"checkpoint's {network} and start from that folder"
            )
    kernels = {"dtype": options.dtype, "attn_implementation": options.attn_implementation}
    empty = empty_model("causal_lm", options.path, **kernels)
    if options.lora is not None:
        add_adapters(empty, options.lora, seed=0)
    actor = parameters_of(Actor(empty), "actor.")
    _check_network(manifest, actor, name, "actor", f"actor.path {options.path}")
    if has_critic:
        check_saved_head(manifest.value_head, config, name=name)
        members = {key.split(".")[2] for key in manifest.parameters if key.startswith(_MEMBERS)}
        check_count(len(members) or 1, config, name=name)
        _check_network(manifest, _critic_parameters(config), name, "critic", critic_start(config))


def _critic_parameters(config: FitConfig) -> dict[str, str]:
    """Return `dtype [shape]` of each parameter of the config's critics; no weights are read."""
    count = config.critic.count
    parameters: dict[str, str] = {}
    for member in range(count):
        empty = empty_value_model(critic_path(config, member), config.critic)
        put_own_head(empty, config)
        choose_trained(empty, config)
        prefix = "critic." if count == 1 else f"{_MEMBERS}{member}."
        parameters |= parameters_of(empty, f"{prefix}model.")
    return parameters


def check_count(saved_count: int, config: FitConfig, *, name: str) -> None:
    """Check that a checkpoint has as many critics as the config.

    Raises: UserError: the numbers differ; it names both.
    """
    if saved_count != config.critic.count:
        raise UserError(
            f"{name} has {saved_count} critic{'s' * (saved_count > 1)}, and critic.count is "
            f"{config.critic.count}: set critic.count={saved_count}, as the run had it"
        )


def check_saved_head(
    saved_options: Mapping[str, Any] | None, config: FitConfig, *, name: str
) -> None:
    """Check that a checkpoint's value head has the form that the config describes.

    The form is the kind of head and its options, what it reads, and what it predicts. Its weights
    are not compared, nor whether it has a bias.

    Args:
        saved_options: the fields of `ValueHead` that the checkpoint has; None for a scalar head.
        name: the checkpoint, for the error.

    Raises: UserError: the forms differ; it says which keys to set.
    """
    saved_head, run_head = (
        ValueHead(**(saved_options or {})),
        replace(configured_head(config.critic), has_bias=False),
    )
    columns = saved_head.num_logprob_columns
    if columns != run_head.num_logprob_columns:
        reads, value = ("reads", "{}") if columns else ("reads no", "null")
        raise UserError(
            f"the value head of {name} {reads} log-probs of sampled tokens: set "
            f"critic.sampled_logprobs={value}, as the run had it"
        )
    if saved_head.target != run_head.target:
        saved_target, target = (head.target or "return" for head in (saved_head, run_head))
        raise UserError(
            f"the critic of {name} predicts the {saved_target}, and critic.target is {target}: set "
            f"critic.target={saved_target}, as the run had it"
        )
    if saved_head != run_head:
        keys = (
            "critic.head"
            if saved_head.layers == run_head.layers
            else "critic.kind and critic.probe"
        )
        raise UserError(
            f"{name} has the value head {saved_head.describe()}, and critic.head is "
            f"{run_head.describe()}: set {keys} as the run had it"
        )


def value_head_options(config: FitConfig) -> dict[str, Any] | None:
    """Return the value head's options for a manifest, or None for a scalar head. Its bias is left
    out, because the parameters show it."""
    head = replace(configured_head(config.critic), has_bias=False)
    return None if head == ValueHead() else asdict(head)


def adapter_options(config: FitConfig, network: str) -> dict[str, Any] | None:
    """Return the LoRA options of `actor` or `critic` for a manifest, or None without adapters."""
    options = getattr(config, network).lora
    return None if options is None else asdict(options)


def _adapters(options: Mapping[str, Any] | None) -> str:
    if options is None:
        return "no adapters"
    return f"adapters of {', '.join(f'{name} {value}' for name, value in options.items())}"


def _check_network(
    manifest: Manifest, model_parameters: Mapping[str, str], name: str, network: str, where: str
) -> None:
    """Check that a checkpoint has the model's parameters of `network`. `where` names the model.

    Raises: UserError: they differ.
    """
    saved_parameters = {k: v for k, v in manifest.parameters.items() if k.startswith(f"{network}.")}
    if difference := _differences(model_parameters, saved_parameters):
        raise UserError(
            f"{name} was saved from another {network} than {where} ({network}.dtype included): "
            f"it has {difference}"
        )


def _differences(model_entries: Mapping[str, str], saved_entries: Mapping[str, str]) -> str:
    """Return a text on how a checkpoint's weights differ from the model's; empty if they do not.

    Both arguments map parameter names to `dtype [shape]`.
    """
    missing, extra = (
        sorted(model_entries.keys() - saved_entries),
        sorted(saved_entries.keys() - model_entries),
    )
    shared = sorted(model_entries.keys() & saved_entries)
    different = [
        f"{k} {saved_entries[k]}, not {model_entries[k]}"
        for k in shared
        if saved_entries[k] != model_entries[k]
    ]
    shown_texts = [
        *different[:_SHOWN],
        *[f"{key} is not in it" for key in missing[:_SHOWN]],
        *[f"{key} is not in the model" for key in extra[:_SHOWN]],
    ]
    total = len(different) + len(missing) + len(extra)
    return "; ".join(shown_texts) + (
        f" and {total - len(shown_texts)} more" if total > len(shown_texts) else ""
    )


def parameters_of(module: nn.Module, prefix: str = "") -> dict[str, str]:
    """Return `dtype [shape]` of each parameter, by name, with whole shapes if sharded."""
    return {
        prefix + name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for name, tensor in module.named_parameters()
    }
