"""The figures of `vapo gates`, by short trainings: a run's beginning, and each network alone.

The module, the stages and the losses are a run's own; there are no checkpoints and no records.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning.pytorch.callbacks import Callback

from vapo.config import resolve
from vapo.studies.gates.rules import GateCurves, GateFigures
from vapo.studies.gates.start_policy import StartPolicy, reach
from vapo.studies.gates.trial_runs import (
    Beginning,
    Collapse,
    StateReturns,
    StatesOf,
    Unlearning,
)
from vapo.studies.short_trainer import train_briefly
from vapo.training.minibatches import NETWORKS
from vapo.training.module import VapoModule
from vapo.training.parts import Sampling, assemble_parts, module_of, num_pretraining_iterations

_POLICY_ITERATIONS = 10


def policy_iterations(num_iterations: int) -> int:
    """How many iterations of the policy follow value pretraining."""
    return min(_POLICY_ITERATIONS, num_iterations)


def measure(
    setting: Sampling,
    start: StartPolicy,
    states_of: StatesOf,
    *,
    num_iterations: int,
    folder: Path,
) -> tuple[GateFigures, GateCurves]:
    """Make the trial runs one after the other, from the config's start each.

    Args:
        states_of: the hidden state before each token of a rollout, for the oracle.
        num_iterations: the most that the trial runs of one network alone take.
        folder: gets the pretrained critic.
    """
    config, progress, batch = setting.config, setting.progress, start.batch
    states = StateReturns(config, states_of)
    progress.note("a run's beginning: value pretraining as configured, then the policy")
    beginning = Beginning(progress, batch, states)
    trial_run(
        setting,
        beginning,
        num_policy_iterations=policy_iterations(num_iterations),
        pretrained_in=folder / "pretrained_critic",
    )
    unlearning = None
    if start.guess is not None:
        progress.note("T_unlearn: the critic alone, from its start, by the policy phase's rules")
        # where there is value pretraining, these are the rollouts that it began with
        new = None if states.states else states
        unlearning = Unlearning(progress, batch, new, start.guess)
        trial_run(setting, unlearning, num_policy_iterations=num_iterations, trained=["critic"])
    progress.note("T_collapse: the policy alone, beside the critic's start")
    # a file's rollouts may be another policy's
    known = beginning.start_lengths if setting.inputs.stored is None else []
    if not known and unlearning is not None:
        known = unlearning.start_lengths
    collapse = Collapse(progress, known)
    behind = 1 + config.training.max_staleness  # so many iterations later a policy is seen
    trial_run(setting, collapse, num_policy_iterations=num_iterations + behind, trained=["actor"])
    curves = GateCurves(
        explained_variance=tuple(point.explained_variance for point in beginning.pretraining),
        value_pretraining=tuple(point.middle for point in beginning.pretraining),
        value_unlearning=() if unlearning is None else tuple(unlearning.middles),
        response_length=tuple(collapse.lengths),
    )
    figures = figures_of(
        setting, start, beginning, unlearning, collapse, states.oracle(batch), num_iterations
    )
    return figures, curves


def trial_run(
    setting: Sampling,
    watcher: Callback,
    *,
    num_policy_iterations: int,
    trained: Sequence[str] = NETWORKS,
    pretrained_in: Path | None = None,
) -> VapoModule:
    """Train from the config's start for so many policy iterations, or until the watcher stops it.

    Args:
        trained: the networks that the policy phase trains.
        pretrained_in: begin with value pretraining as configured, and save its critic there;
            None: begin with the policy phase.

    Raises:
        UserError: whatever a run's networks, engine and rewards raise.
    """
    # a trial is shorter than a run, whose rate does not fall so soon
    own = replace(setting.config.training, num_iterations=num_policy_iterations, decay_fraction=0.0)
    setting = replace(setting, config=replace(setting.config, training=own))
    module = module_of(setting.config, setting.inputs)
    parts = assemble_parts(
        module,
        setting,
        progress=setting.progress,
        critic_dir=pretrained_in,
        stored=setting.inputs.stored,
        trained=trained,
    )
    num_pretraining = 0 if pretrained_in is None else num_pretraining_iterations(module)
    train_briefly(parts, watcher, num_iterations=num_pretraining + num_policy_iterations)
    return module


def figures_of(
    setting: Sampling,
    start: StartPolicy,
    beginning: Beginning,
    unlearning: Unlearning | None,
    collapse: Collapse,
    oracle: float | None,
    num_iterations: int,
) -> GateFigures:
    """What the rules are about, after the trial runs; `oracle` is its explained variance."""
    config, batch, numbers = setting.config, start.batch, resolve(setting.config)
    first, last = beginning.pretraining[0], beginning.pretraining[-1]
    is_pretrained = numbers.value_pretraining_iterations > 0
    weight_adaptive, horizon_adaptive = reach(config, batch, adaptive=True)
    weight_constant, horizon_constant = reach(config, batch, adaptive=False)
    visits = config.training.num_iterations * numbers.num_prompts
    return GateFigures(
        mean_reward=start.mean_reward,
        mean_length=start.mean_length,
        start_length=collapse.start_length,
        guess=start.guess,
        value_start=first.middle,
        value_pretrained=last.middle if is_pretrained else None,
        explained_variance_start=first.explained_variance,
        explained_variance_pretrained=last.explained_variance if is_pretrained else None,
        explained_variance_oracle=oracle,
        num_iterations=num_iterations,
        unlearned_after=None if unlearning is None else unlearning.unlearned_after,
        unlearned_between=(None, None) if unlearning is None else unlearning.unlearned_between,
        collapsed_after=collapse.collapsed_after,
        weight_adaptive=weight_adaptive,
        weight_constant=weight_constant,
        horizon_adaptive=horizon_adaptive,
        horizon_constant=horizon_constant,
        clip_fraction_high=statistics.fmean(beginning.clip_fractions),
        share_right=statistics.fmean(beginning.shares_right),
        length_variation=statistics.fmean(beginning.length_variations),
        share_returned=beginning.share_returned,
        prompt_visits=visits / len(setting.inputs.prompts.train),
    )
