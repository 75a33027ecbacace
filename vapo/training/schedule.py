"""An iteration's passes over its rollouts, and the iterations that are looked at more closely.

A pass goes over the rollout batch once, in minibatches of one size. Actor and critic share the
first pass where their minibatches are equally large; every other pass is of one network alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from vapo.config import FitConfig, resolve
from vapo.config.hyperparameters import num_actor_steps
from vapo.types import IterationStart, Phase

ACTOR, CRITIC = "actor", "critic"


@dataclass(frozen=True)
class Pass:
    """One pass over the rollout batch: the networks that it trains, and its optimizer steps.

    `index` counts the iteration's passes from 0; every pass is shuffled anew.
    """

    index: int
    networks: tuple[str, ...]
    num_minibatches: int


def passes(config: FitConfig, phase: Phase) -> list[Pass]:
    """The passes of an iteration of the phase, in the order in which they come.

    The critic makes `critic.epochs` of them, on the value targets that the rollout batch has from
    before its first. At the defaults there is one, which trains all that the phase trains.

    Source: SAO (2 critic epochs to one of the actor); EasyPPO (4 minibatches of the critic to one
    of the actor).
    """
    found = enumerate(_passes(config, phase))
    return [Pass(index, networks, number) for index, (networks, number) in found]


def _passes(config: FitConfig, phase: Phase) -> Iterator[tuple[tuple[str, ...], int]]:
    of_actor, of_critic = num_minibatches(config, ACTOR), num_minibatches(config, CRITIC)
    if not config.algorithm.has_critic:
        yield (ACTOR,), of_actor
        return
    epochs = config.critic.epochs
    if phase is Phase.POLICY_OPTIMIZATION:
        if of_actor == of_critic:
            yield (ACTOR, CRITIC), of_actor
            epochs -= 1
        else:
            yield (ACTOR,), of_actor
    for _ in range(epochs):
        yield (CRITIC,), of_critic


def num_minibatches(config: FitConfig, network: str) -> int:
    """The number of optimizer steps of `actor` or `critic` in a pass."""
    if network == ACTOR:
        return num_actor_steps(config)
    hyperparameters = resolve(config)
    total = hyperparameters.num_prompts * hyperparameters.group_size
    size = config.critic.minibatch_size or config.training.minibatch_size or total
    return config.critic.num_minibatches or total // size


def num_steps(config: FitConfig, phase: Phase) -> int:
    """The number of minibatches in an iteration of the phase, each an optimizer step."""
    return sum(part.num_minibatches for part in passes(config, phase))


def common_minibatches(config: FitConfig) -> int:
    """A number of rows that this divides splits into the minibatches of either network."""
    of_actor = num_minibatches(config, ACTOR)
    if not config.algorithm.has_critic:
        return of_actor
    return math.lcm(of_actor, num_minibatches(config, CRITIC))


def phases_differ(config: FitConfig) -> bool:
    """Whether iterations of the two phases have different numbers of minibatches."""
    return len({num_steps(config, phase) for phase in Phase}) > 1


def lr_of_phase(config: FitConfig, network: str, phase: Phase) -> float | None:
    """The learning rate after warmup, where it depends on the phase; None: it does not."""
    own = config.components.value_pretraining.lr
    if network != CRITIC or own is None:
        return None
    return own if phase is Phase.VALUE_PRETRAINING else config.critic.optimizer.lr


def is_due(config: FitConfig, start: IterationStart, every_n: int, *, ends_phase: bool) -> bool:
    """Whether an iteration is the first, the last or an n-th of its phase.

    Args:
        ends_phase: whether the iteration has ended value pretraining, which is known after it.
    """
    if start.phase is Phase.POLICY_OPTIMIZATION:
        number = start.policy_iterations + 1
        is_last = number >= config.training.num_iterations
    else:
        number, is_last = start.number, ends_phase
    return number == 1 or is_last or number % every_n == 0


def page_is_due(config: FitConfig, start: IterationStart, *, ends_phase: bool) -> bool:
    """Whether the iteration gets a value page."""
    every_n = config.value_pages.every_n_iterations
    return every_n is not None and is_due(config, start, every_n, ends_phase=ends_phase)
