"""Whether a checkpoint is of the model that a config describes: asked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from vapo.config import FitConfig
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor, Critic
from vapo.networks.build import choose_trained
from vapo.networks.critic_folders import critic_path, critic_start
from vapo.networks.lora import add_adapters
from vapo.networks.meta_device import empty_model, empty_value_model
from vapo.networks.own_head import put_own_head
from vapo.networks.value_head import ValueHead, head_of
from vapo.runs.manifests import Manifest

_SHOWN = 3


def check_compatible(manifest: Manifest, config: FitConfig, *, name: str) -> None:
    """Raises: UserError naming what differs: the critic, parameters, their shapes or dtypes."""
    has_critic = any(key.startswith("critic.") for key in manifest.parameters)
    if has_critic != config.algorithm.has_critic:
        raise UserError(
            f"{name} has {'a' if has_critic else 'no'} critic, and this config has "
            f"{'one' if config.algorithm.has_critic else 'none'} (algorithm.advantage_estimator "
            f"is {config.algorithm.advantage_estimator})"
        )
    options = config.actor
    for network, theirs in (("actor", manifest.lora), ("critic", manifest.critic_lora)):
        ours = adapter_options(config, network)
        if theirs != ours:
            raise UserError(
                f"{name} has {_adapters(theirs)}, and {network}.lora asks for "
                f"{_adapters(ours)}: set it as the run had it, or export the "
                f"checkpoint's {network} and start from that folder"
            )
    kernels = {"dtype": options.dtype, "attn_implementation": options.attn_implementation}
    empty = empty_model("causal_lm", options.path, **kernels)
    if options.lora is not None:
        add_adapters(empty, options.lora, seed=0)
    actor = parameters_of(Actor(empty), "actor.")
    _check_network(manifest, actor, name, "actor", f"actor.path {options.path}")
    if has_critic:
        check_value_head(manifest.value_head, config, name=name)
        check_count(_count_in(manifest), config, name=name)
        _check_network(manifest, _critic_parameters(config), name, "critic", critic_start(config))


def _critic_parameters(config: FitConfig) -> dict[str, str]:
    count = config.critic.count
    parameters: dict[str, str] = {}
    for member in range(count):
        empty = empty_value_model(critic_path(config, member), config.critic)
        put_own_head(empty, config)
        choose_trained(empty, config)
        prefix = "critic." if count == 1 else f"critic.members.{member}."
        parameters |= parameters_of(Critic(empty), prefix)
    return parameters


def _count_in(manifest: Manifest) -> int:
    """How many critics a checkpoint has."""
    prefix = "critic.members."
    names = [key.removeprefix(prefix) for key in manifest.parameters if key.startswith(prefix)]
    return len({name.partition(".")[0] for name in names}) or 1


def check_count(theirs: int, config: FitConfig, *, name: str) -> None:
    """Raises: UserError naming both, if the config has another number of critics."""
    if theirs != config.critic.count:
        raise UserError(
            f"{name} has {theirs} critic{'s' * (theirs > 1)}, and critic.count is "
            f"{config.critic.count}: set critic.count={theirs}, as the run had it"
        )


def check_value_head(theirs: Mapping[str, Any] | None, config: FitConfig, *, name: str) -> None:
    """Raises: UserError naming both heads, if they compute other values of the same numbers."""
    found, ours = ValueHead(**(theirs or {})), replace(head_of(config.critic), has_bias=False)
    columns = found.num_logprob_columns
    if columns != ours.num_logprob_columns:
        reads, value = ("reads", "{}") if columns else ("reads no", "null")
        raise UserError(
            f"the value head of {name} {reads} log-probs of sampled tokens: set "
            f"critic.sampled_logprobs={value}, as the run had it"
        )
    if found != ours:
        raise UserError(
            f"{name} has the value head {found.describe()}, and critic.head is "
            f"{ours.describe()}: set critic.head as the run had it"
        )


def value_head_options(config: FitConfig) -> dict[str, Any] | None:
    """As a manifest has them. Whether there is a bias the parameters tell."""
    head = replace(head_of(config.critic), has_bias=False)
    return None if head == ValueHead() else asdict(head)


def adapter_options(config: FitConfig, network: str) -> dict[str, Any] | None:
    """As a manifest has them."""
    options = getattr(config, network).lora
    return None if options is None else asdict(options)


def _adapters(options: Mapping[str, Any] | None) -> str:
    if options is None:
        return "no adapters"
    return f"adapters of {', '.join(f'{name} {value}' for name, value in options.items())}"


def _check_network(
    manifest: Manifest, ours: Mapping[str, str], name: str, network: str, where: str
) -> None:
    theirs = {k: v for k, v in manifest.parameters.items() if k.startswith(f"{network}.")}
    missing, left = sorted(ours.keys() - theirs), sorted(theirs.keys() - ours)
    shared = sorted(ours.keys() & theirs)
    other = [f"{k} {theirs[k]}, not {ours[k]}" for k in shared if theirs[k] != ours[k]]
    differences = [
        *other[:_SHOWN],
        *[f"{key} is not in it" for key in missing[:_SHOWN]],
        *[f"{key} is not in the model" for key in left[:_SHOWN]],
    ]
    if differences:
        total = len(other) + len(missing) + len(left)
        more = f" and {total - len(differences)} more" if total > len(differences) else ""
        raise UserError(
            f"{name} is of another {network} than {where} ({network}.dtype included): it has "
            f"{'; '.join(differences)}{more}"
        )


def parameters_of(module: nn.Module, prefix: str = "") -> dict[str, str]:
    """Name -> `dtype [shape]`, of the whole parameter where it is sharded."""
    return {
        prefix + name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for name, tensor in module.named_parameters()
    }
