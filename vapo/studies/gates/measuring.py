"""Measure the figures of `vapo gates` by short trainings of a run's first iterations.

Module, stages and losses are those of `vapo fit`. No checkpoints and no records are written.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning.pytorch.callbacks import Callback

from vapo.config import resolve
from vapo.studies.gates.rules import GateCurves, GateFigures
from vapo.studies.gates.start_policy import StartPolicy, mean_weight_and_horizon
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

_POLICY_ITERATIONS = 10  # most policy iterations of the first trial run


def policy_iterations(num_iterations: int) -> int:
    """Return the policy iterations of the first trial run: `num_iterations`, but at most 10."""
    return min(_POLICY_ITERATIONS, num_iterations)


def measure(
    setting: Sampling,
    start: StartPolicy,
    states_of: StatesOf,
    *,
    num_iterations: int,
    folder: Path,
) -> tuple[GateFigures, GateCurves]:
    """Make the trial runs of `vapo gates` one after the other, and return what they measured.

    Each begins with the config's start networks. The first one trains as configured, the second
    only the critic (if the worth of a guess was measured), the third only the policy.

    Args:
        start: the start policy's held-out rollouts, and the worth of a guess.
        states_of: returns the task's state before each token of a rollout; the best explained
            variance that a critic could reach is computed from the states.
        num_iterations: the most policy iterations of the second and third trial run. The first has
            at most 10, and the third has as many more as it takes until an update shows in its
            rollouts.
        folder: the pretrained critic is saved here.
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
        # value pretraining began with the same rollouts: they are not counted twice
        state_returns = None if states.states else states
        unlearning = Unlearning(progress, batch, state_returns, start.guess)
        trial_run(setting, unlearning, num_policy_iterations=num_iterations, trained=["critic"])
    progress.note("T_collapse: the policy alone, beside the critic's start")
    # rollouts that are read from a file may be another policy's
    start_lengths = beginning.start_lengths if setting.inputs.stored is None else []
    if not start_lengths and unlearning is not None:
        start_lengths = unlearning.start_lengths
    collapse = Collapse(progress, start_lengths)
    delay = 1 + config.training.max_staleness  # iterations until an update shows in the rollouts
    trial_run(setting, collapse, num_policy_iterations=num_iterations + delay, trained=["actor"])
    curves = GateCurves(
        explained_variance=tuple(point.explained_variance for point in beginning.pretraining),
        value_pretraining=tuple(point.middle for point in beginning.pretraining),
        value_unlearning=() if unlearning is None else tuple(unlearning.middles),
        response_length=tuple(collapse.lengths),
    )
    figures = collect_figures(
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
    """Train the config's start networks until the watcher stops the run or all iterations are over.

    The learning rate does not decay. Return the trained module.

    Args:
        watcher: measures the networks and may stop the run.
        num_policy_iterations: the most iterations of the policy phase.
        trained: the networks that the policy phase trains.
        pretrained_in: the folder for the pretrained critic. The run then begins with value
            pretraining, as configured. If None, it begins with the policy phase.

    Raises:
        UserError: the networks, the engine or the rewards cannot be made, as in `vapo fit`.
    """
    # the learning rate of the whole run would not decay within a trial's few iterations
    training = replace(
        setting.config.training, num_iterations=num_policy_iterations, decay_fraction=0.0
    )
    setting = replace(setting, config=replace(setting.config, training=training))
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


def collect_figures(
    setting: Sampling,
    start: StartPolicy,
    beginning: Beginning,
    unlearning: Unlearning | None,
    collapse: Collapse,
    oracle: float | None,
    num_iterations: int,
) -> GateFigures:
    """Collect the figures from which `vapo gates` makes its verdicts, after the trial runs.

    Args:
        beginning: measured the first trial run, which trained as configured.
        unlearning: measured the critic alone; None if this was not run.
        collapse: measured the policy alone.
        oracle: the best explained variance that a critic could reach; None if it is unknown.
        num_iterations: the most policy iterations of the trial runs.
    """
    config, batch, numbers = setting.config, start.batch, resolve(setting.config)
    first, last = beginning.pretraining[0], beginning.pretraining[-1]
    is_pretrained = numbers.value_pretraining_iterations > 0
    weight_adaptive, horizon_adaptive = mean_weight_and_horizon(config, batch, adaptive=True)
    weight_constant, horizon_constant = mean_weight_and_horizon(config, batch, adaptive=False)
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
