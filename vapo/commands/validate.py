"""`vapo validate`: the held-out score of a policy, from its folder or from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from vapo.advantages.estimators import estimator_of
from vapo.commands.sampling import load_policy, policy_player_of, read_inputs
from vapo.config import FitConfig, resolve
from vapo.diagnostics.iteration_metrics import value_metrics
from vapo.diagnostics.value_page.heldout import (
    check_heldout_groups,
    check_request,
    evaluated_heldout,
    heldout_batch,
    load_forward_networks,
    write_page,
)
from vapo.diagnostics.value_truth.measure import (
    compare_with_values,
    describe_truth,
    measure_truth,
    on_rows,
    truth_metrics,
)
from vapo.diagnostics.value_truth.points import TruthPoint
from vapo.diagnostics.value_truth.verdict import verdict
from vapo.errors.shown_text import say
from vapo.evaluation import EvaluationResult, evaluate, evaluation_settings
from vapo.networks.build import check_head_is_kept
from vapo.networks.own_head import check_own_head
from vapo.prompts.critic_prompts import with_critic_prompts
from vapo.prompts.load import PromptSplit
from vapo.rewards.scorer import make_scorer
from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.engines.selection import ActorAccess
from vapo.runs.checkpoints import Checkpoint, read_checkpoint
from vapo.runs.resuming import find_checkpoint
from vapo.system.process import derive_seed
from vapo.system.progress import Progress
from vapo.types import RolloutBatch


def run(
    config: FitConfig,
    *,
    ckpt_path: str | None = None,
    value_page: str | None = None,
    value_truth: int | None = None,
) -> dict[str, float]:
    """Evaluate a policy on held-out prompts, print its metrics, and return them.

    Args:
        ckpt_path: the checkpoint of the policy; None: the config's own folder.
        value_page: the path of a page of the critic's values, which is written if it is given.
        value_truth: how many continuations measure the true value of each prefix; None: no prefix.
    """
    page = None if value_page is None else Path(value_page)
    if page is not None:
        check_request(page, config)
    if page is not None or value_truth is not None:
        check_heldout_groups(config)
        estimator_of(config.algorithm)
        check_own_head(config)
        if ckpt_path is None:
            check_head_is_kept(config)
    if value_truth is not None:
        truth = replace(config.value_truth, num_continuations=value_truth)
        config = replace(config, value_truth=truth)
    judges_values = page is not None or (value_truth is not None and config.algorithm.has_critic)
    tokenizer, prompts = read_inputs(config)
    if judges_values:
        prompts = with_critic_prompts(prompts, config, tokenizer)
    path = None if ckpt_path is None else find_checkpoint(config.output_dir, ckpt_path)
    checkpoint = None if path is None else Checkpoint(path, read_checkpoint(path, verified=True))
    access, networks = load_policy(config, checkpoint), None
    if judges_values:
        networks = load_forward_networks(config, access.model, tokenizer, checkpoint, access.device)
    del checkpoint  # it takes as much memory as the networks
    result, batch, measured = sample_heldout(
        config, prompts, access, tokenizer, value_truth, judges_values
    )
    metrics, measured_truth, estimated, checked = result.metrics, None, None, None
    if networks is not None:
        estimated, checked = evaluated_heldout(config, batch, networks)
        metrics |= value_metrics(estimated, resolve(config))
    if measured is not None:
        points, num_tokens = measured
        if checked is not None:
            points = on_rows(points, checked.rows)
        values = None if estimated is None else estimated.old_values
        measured_truth = compare_with_values(points, num_tokens, values, config, seed=config.seed)
    if page is not None and estimated is not None and checked is not None:
        write_page(page, config, estimated, checked, tokenizer, path, truth=measured_truth)
    for key, value in metrics.items():
        say(f"{key}: {value:.4f}")
    if measured_truth is not None:
        say(describe_truth(measured_truth.figures))
        for remark in verdict(measured_truth.figures):
            say(f"{remark.text} ({remark.row})")
        metrics |= truth_metrics(measured_truth)
    if page is not None:
        say(page)
    return metrics


def sample_heldout(
    config: FitConfig,
    prompts: PromptSplit,
    access: ActorAccess,
    tokenizer: PreTrainedTokenizerBase,
    value_truth: int | None,
    judges_values: bool,
) -> tuple[EvaluationResult, RolloutBatch, tuple[list[TruthPoint], int] | None]:
    """Evaluate the policy on held-out prompts.

    Returns: the evaluation's result; its rollouts as a batch, with the columns of the estimator's
        baseline if `judges_values`; and with `value_truth` the measured points and the number of
        tokens that were sampled for them, else None.
    """
    measured, budget = None, config.rollouts.max_response_tokens
    with (
        Progress() as progress,
        make_scorer(config) as scorer,
        policy_player_of(config, access, tokenizer, scorer) as player,
    ):
        result = evaluate(
            prompts.heldout,
            player=player,
            config=config.evaluation,
            max_response_tokens=budget,
            progress=progress,
        )
        batch = heldout_batch(config, result.rollouts)
        settings = evaluation_settings(config.evaluation, budget)
        collection = RolloutCollection(config, prompts=prompts, player=player, progress=progress)
        if value_truth is not None:
            measured = measure_truth(
                batch,
                collection.continuation_sampler(settings),
                seed=derive_seed(config.evaluation.seed, "value truth"),
                note=progress.note,
            )
        if judges_values:
            batch, _ = collection.with_baselines(batch, settings, 0)
    return result, batch, measured
