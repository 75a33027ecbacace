"""`vapo gates`: which effects of the paper's ablation a setting can show, before it costs hours."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from matplotlib import pyplot

from vapo.commands.fit import checked_inputs
from vapo.commands.sampling import command_recorder, load_policy, policy_player_of
from vapo.config import FitConfig, resolve
from vapo.diagnostics.oracle import oracle_of
from vapo.diagnostics.value_page.heldout import check_heldout_groups
from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.files.made_folders import make_folders, taken_back_if_refused
from vapo.files.whole_files import write_text, write_whole
from vapo.networks.build import check_head_is_kept
from vapo.networks.critic_folders import critic_start
from vapo.rewards.scorer import make_scorer
from vapo.runs.summary import finite
from vapo.studies.gates.measuring import measure, policy_iterations
from vapo.studies.gates.report import console_text, figure, markdown
from vapo.studies.gates.rules import Gate, GateCurves, GateFigures, judge
from vapo.studies.gates.start_policy import StartPolicy, answer_token_ids, sample_start
from vapo.tracking.logger import RunLogger
from vapo.training.parts import Sampling


def run(
    config: FitConfig,
    *,
    answer_now: str | None = None,
    num_iterations: int = 30,
    output_dir: Path | None = None,
) -> Path:
    """Run `vapo gates`: measure a config by short trial trainings, and judge its components.

    The verdicts say for which components an ablation could show an effect in this config. Return
    the folder with `gates.md`, `gates.json` and `gates.png`.

    Args:
        answer_now: text that makes a response answer at its middle.
        num_iterations: the most policy iterations of a trial. The trial of the policy alone has
            `1 + training.max_staleness` more, until an update shows in the rollouts.
    """
    started = time.monotonic()
    inputs = checked_inputs(config)
    check_head_is_kept(config)
    check_heldout_groups(config)
    tokenizer, heldout = inputs.tokenizer, inputs.prompts.heldout[: config.evaluation.num_prompts]
    if not heldout:
        raise UserError("data.heldout: no prompts to sample held-out rollouts of")
    answer_ids, budget = None, config.rollouts.max_response_tokens
    if answer_now is not None:
        answer_ids = answer_token_ids(answer_now, tokenizer, max_response_tokens=budget)
    folder = output_dir or Path(config.output_dir) / "gates"
    critic = critic_start(config)
    with (
        taken_back_if_refused(make_folders(folder)),
        make_scorer(config) as scorer,
        command_recorder(config, "gates", inputs.prompts, critic=critic) as (progress, logger),
    ):
        setting = Sampling(config, inputs, scorer, progress)
        with policy_player_of(config, load_policy(config), tokenizer, scorer) as player:
            start = sample_start(config, heldout, player, progress, answer_ids=answer_ids)
        del player  # frees the memory of its policy
        progress.note(gates_cost(config, start, num_iterations))
        figures, curves = measure(
            setting,
            start,
            oracle_of(config, tokenizer),
            num_iterations=num_iterations,
            folder=folder,
        )
        gates = judge(figures)
        about = [
            f"{len(start.batch)} held-out responses of {config.actor.path}, critic from "
            f"{critic}, seed {config.seed}",
            f"answered at the middle with {answer_now!r}" if answer_now else "no --answer_now",
            f"at most {num_iterations} iterations a trial; {time.monotonic() - started:.0f} s in "
            "all",
        ]
        record(folder, figures, curves, gates, about, logger)
        where = logger.describe()
    say(f"{console_text(figures, gates)}\n\n{about[-1]}\n{where}\n{folder}")
    return folder


def gates_cost(config: FitConfig, start: StartPolicy, num_iterations: int) -> str:
    """Return a sentence on the most iterations, rollouts and tokens that measuring takes."""
    numbers, few = resolve(config), policy_iterations(num_iterations)
    unlearning = num_iterations if start.guess is not None else 0
    iterations = numbers.value_pretraining_iterations + few + unlearning + num_iterations + 1
    rollouts = iterations * numbers.num_prompts * numbers.group_size
    without = "" if unlearning else "; without --answer_now no value of a guess, and no T_unlearn"
    return (
        f"{numbers.value_pretraining_iterations} iterations of value pretraining and {few} of the "
        f"policy, at most {unlearning} of the critic alone and {num_iterations + 1} of the policy "
        f"alone: up to {rollouts:,} rollouts or about {rollouts * start.mean_length:,.0f} response "
        f"tokens{without}"
    )


def record(
    folder: Path,
    figures: GateFigures,
    curves: GateCurves,
    gates: Sequence[Gate],
    about: Sequence[str],
    logger: RunLogger,
) -> None:
    """Write the gates' text, numbers and figure into the folder and to MLflow, also the curves."""
    numbers = {
        "figures": asdict(figures),
        "curves": asdict(curves),
        "verdicts": {gate.component: gate.word for gate in gates},
    }
    texts = {
        "gates.md": markdown(figures, gates, about=about),
        "gates.json": json.dumps(finite(numbers), indent=1) + "\n",
    }
    for name, text in texts.items():
        write_text(folder / name, text)
        logger.log_text(text, name)
    gates_figure = figure(figures, curves)
    logger.log_figure(gates_figure, "gates.png")
    write_whole(
        folder / "gates.png", partial(gates_figure.savefig, format="png", bbox_inches="tight")
    )
    pyplot.close(gates_figure)
    for name, curve in {
        "heldout_explained_variance": curves.explained_variance,
        "value_middle_pretraining": curves.value_pretraining,
        "value_middle_unlearning": curves.value_unlearning,
        "response_length_mean": curves.response_length,
    }.items():
        for iteration, value in enumerate(curve):
            logger.log_metrics({f"gates/{name}": value}, step=iteration)
    logger.set_tags({f"gates/{gate.component}": gate.word for gate in gates})
