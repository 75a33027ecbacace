"""Makes optimizers and learning-rate schedules, and numbers the optimizers' saved state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from vapo.config import FitConfig
from vapo.config.critic import CriticConfig, ProbeCritic
from vapo.config.networks import ActorConfig, OptimizerConfig
from vapo.networks.value_head import LOGPROB_SCORE
from vapo.types import IterationStart, Phase


def make_optimizer(
    network: nn.Module,
    options: OptimizerConfig,
    *,
    lr_of_modules: Mapping[str, float] | None = None,
) -> AdamW:
    """Make AdamW for a network's trainable parameters, with its state already allocated.

    Parameters of modules whose last name is a key of `lr_of_modules` get that learning rate, in a
    parameter group of their own.

    The state is allocated because saving a sharded optimizer that never stepped fakes a step, which
    would change later updates of an actor that is frozen during value pretraining.
    """
    module_lrs = lr_of_modules or {}
    groups: dict[str, list[nn.Parameter]] = {"": [], **{name: [] for name in module_lrs}}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            module = name.rpartition(".")[0].rpartition(".")[2]
            groups[module if module in module_lrs else ""].append(parameter)
    parameters = [p for group in groups.values() for p in group]
    # one pass over weights, gradients and moments: on a CPU a quarter of the time of torch's own
    # choice, on a GPU no copy of a moment; shards have it, too
    is_fused = {p.device.type for p in parameters} in ({"cpu"}, {"cuda"})
    optimizer = AdamW(
        [
            {"params": group, "lr": module_lrs.get(name, options.lr)}
            for name, group in groups.items()
        ],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        weight_decay=options.weight_decay,
        fused=True if is_fused else None,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device if is_fused else "cpu"),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def copy_of_moments(optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """Return a copy of the optimizer's state (step, moments) of each parameter, in order."""
    return [
        {name: tensor.detach().clone() for name, tensor in optimizer.state[parameter].items()}
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def put_moments(optimizer: Optimizer, moments: Sequence[Mapping[str, Tensor]]) -> None:
    """Copy the state that `copy_of_moments` returned back into the optimizer."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, saved in zip(parameters, moments, strict=True):
        for name, tensor in saved.items():
            optimizer.state[parameter][name].copy_(tensor)


def make_optimizers(
    module: nn.Module, options: Mapping[str, ActorConfig | CriticConfig]
) -> tuple[list[Optimizer], list[LambdaLR]]:
    """Make an optimizer and its schedule for each network of a module.

    Args:
        options: the config of each network, by the network's name in the module. Both returned
            lists have this order.
    """
    optimizers: list[Optimizer] = []
    schedulers = []
    for name, network in options.items():
        sampled_logprobs = network.sampled_logprobs if isinstance(network, CriticConfig) else None
        lr_of_modules = None if sampled_logprobs is None else {LOGPROB_SCORE: sampled_logprobs.lr}
        settings = network.optimizer
        if isinstance(network, ProbeCritic):
            settings = replace(settings, lr=network.probe.lr)
        optimizers.append(
            make_optimizer(module.get_submodule(name), settings, lr_of_modules=lr_of_modules)
        )
        schedulers.append(make_scheduler(optimizers[-1], network.optimizer.warmup_steps))
    return optimizers, schedulers


def options_of_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options (learning rate, betas ...) of each parameter group of a new optimizer.

    `fused` and `foreach` are left out, because they depend on the device.
    """
    excluded_keys = ("params", "fused", "foreach")
    return [{k: v for k, v in g.items() if k not in excluded_keys} for g in optimizer.param_groups]


def take_options(
    optimizer: Optimizer, scheduler: LambdaLR, options: Sequence[Mapping[str, Any]]
) -> None:
    """Set a restored optimizer's options to those of the current config.

    Moments and step counts stay. The learning rates are those of the schedule at the restored step.
    If the config has not changed, nothing changes.

    Args:
        options: what `options_of_groups` returned for the new optimizer.
    """
    factor = scheduler.lr_lambdas[0](scheduler.last_epoch)
    for group, group_options in zip(optimizer.param_groups, options, strict=True):
        group.update(group_options, lr=group_options["initial_lr"] * factor)
    scheduler.base_lrs = [group_options["initial_lr"] for group_options in options]


def make_scheduler(
    optimizer: Optimizer, warmup_steps: int, *, num_steps: int = 0, decay_steps: int = 0
) -> LambdaLR:
    """Make a learning-rate schedule: a linear warmup, then a constant.

    In the last `decay_steps` of `num_steps` the rate falls linearly to 0; if `decay_steps` is 0, it
    stays. In the warmup the factor is (step + 1) / warmup_steps, so that the first step already
    changes the weights.
    """

    def factor(step: int) -> float:
        warmup = min(1.0, (step + 1) / max(warmup_steps, 1))
        return min(warmup, max(num_steps - step, 0) / decay_steps) if decay_steps else warmup

    return LambdaLR(optimizer, factor)


def clip_gradient(network: nn.Module, max_norm: float) -> Tensor:
    """Scale the network's gradient down to the norm `max_norm`; return its norm before that.

    Sharded networks work, too; the returned norm is then a plain scalar on every rank.
    """
    # torch takes all tensors at once by itself only if they are not shards
    is_sharded = any(isinstance(parameter, DTensor) for parameter in network.parameters())
    foreach = True if is_sharded else None
    norm = nn.utils.clip_grad_norm_(network.parameters(), max_norm, foreach=foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def lr_of_iteration(config: FitConfig, network: str, start: IterationStart) -> float | None:
    """Return the network's learning rate after warmup in this iteration, or None if the rate never
    changes after warmup."""
    if network == "actor":
        steps = config.training.decay_fraction * config.training.num_iterations
        iterations_left = config.training.num_iterations - start.policy_iterations
        return config.actor.optimizer.lr * min(1.0, iterations_left / steps) if steps else None
    pretraining_lr = config.components.value_pretraining.lr
    if pretraining_lr is None or config.critic.reads_actor:
        return None
    return pretraining_lr if start.phase is Phase.VALUE_PRETRAINING else config.critic.optimizer.lr


def set_learning_rate(optimizer: Optimizer, scheduler: LambdaLR, lr: float) -> None:
    """Set the optimizer's learning rate for the next step to `lr` times the schedule's factor.

    Only the first parameter group is set. Modules with a learning rate of their own keep it.
    """
    first = optimizer.param_groups[0]
    first["lr"] = lr * scheduler.lr_lambdas[0](scheduler.last_epoch)


def stepper(module: L.LightningModule, network: str) -> tuple[LightningOptimizer, LambdaLR]:
    """Return the optimizer of `actor` or `critic`, and its scheduler.

    The optimizer is in Lightning's wrapper, whose steps Lightning counts in `global_step`.
    """
    index = ("actor", "critic").index(network)
    wrappers, schedulers = module.optimizers(), module.lr_schedulers()
    wrapper = wrappers[index] if isinstance(wrappers, list) else wrappers
    scheduler = schedulers[index] if isinstance(schedulers, list) else schedulers
    assert isinstance(wrapper, LightningOptimizer)
    assert isinstance(scheduler, LambdaLR)
    return wrapper, scheduler


def number_parameters_as_module(
    module: nn.Module, optimizers: Sequence[Optimizer], states: list[dict[str, Any]]
) -> None:
    """Renumber saved optimizer states, in place, by each parameter's position in the whole module.

    Torch numbers each optimizer's parameters from 0, but a sharded run numbers them through the
    whole module. With one numbering, either can load the other's checkpoint.
    """
    place = {parameter: i for i, parameter in enumerate(module.parameters())}
    for optimizer, saved in zip(optimizers, states, strict=True):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        number = {old: place[parameter] for old, parameter in enumerate(parameters)}
        saved["state"] = {number[old]: state for old, state in saved["state"].items()}
        for group in saved["param_groups"]:
            group["params"] = [number[old] for old in group["params"]]
