"""`vapo validate`: the held-out score of a policy, from its folder or from a checkpoint."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from vapo.advantages.estimators import estimator_of
from vapo.config import FitConfig
from vapo.config.continuation_rules import unlike_the_rollouts
from vapo.diagnostics.iteration_metrics import value_metrics
from vapo.diagnostics.value_page.heldout import (
    check_request,
    evaluated_heldout,
    load_forward_networks,
    write_page,
)
from vapo.diagnostics.value_truth.measure import (
    beside_values,
    describe_truth,
    measure,
    on_rows_of,
    truth_metrics,
)
from vapo.diagnostics.value_truth.points import TruthPoint
from vapo.errors import UserError
from vapo.evaluation import EvaluationResult, evaluate, evaluation_settings
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.networks.own_head import check_own_head
from vapo.prompts.critic_prompts import with_critic_prompts
from vapo.prompts.load import load_prompts
from vapo.rewards.scorer import Scorer
from vapo.rollouts.batch import make_rollout_batch
from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.engines.contract import Sampler
from vapo.rollouts.engines.selection import ActorAccess, access_to, check_engine, make_sampler
from vapo.runs.checkpoints import Checkpoint, read_checkpoint
from vapo.runs.run_dirs import find_checkpoint
from vapo.system.devices import pick_device, set_threads
from vapo.system.progress import Progress
from vapo.system.quiet import quiet_libraries
from vapo.system.seeding import derive_seed


def run(
    config: FitConfig,
    *,
    ckpt_path: str | None = None,
    value_page: str | None = None,
    value_truth: int | None = None,
) -> dict[str, float]:
    """Evaluate and print every metric, one a line; then, if one is asked for, the page's path."""
    quiet_libraries()
    config, page = _checked(config, value_page, value_truth)
    judges_values = page is not None or value_truth is not None
    set_threads(config.trainer)
    check_engine(config)
    tokenizer = load_tokenizer(config.actor.path, key="actor.path")
    prompts = load_prompts(config.data, tokenizer)
    if judges_values:
        prompts = with_critic_prompts(prompts, config, tokenizer)
    path = None if ckpt_path is None else find_checkpoint(config.output_dir, ckpt_path)
    checkpoint = None if path is None else Checkpoint(path, read_checkpoint(path, verified=True))
    access, networks = load_policy(config, checkpoint), None
    if judges_values:
        networks = load_forward_networks(config, access.model, tokenizer, checkpoint, access.device)
    del checkpoint  # its contents need as much memory as the networks
    baseline, measured = None, None
    with (
        closing(make_sampler(config, access, tokenizer)) as sampler,
        Progress() as progress,
        Scorer(
            config.rewards,
            max_response_tokens=config.rollouts.max_response_tokens,
            data=config.data,
        ) as scorer,
    ):
        result = evaluate(
            prompts.heldout,
            sampler=sampler,
            scorer=scorer,
            config=config.evaluation,
            max_response_tokens=config.rollouts.max_response_tokens,
            progress=progress,
        )
        if value_truth is not None:
            measured = measure_heldout(config, result, sampler, scorer, tokenizer, progress)
        if page is not None and config.algorithm.needs_greedy_baseline:
            baseline = RolloutCollection(
                config, prompts=prompts, scorer=scorer, sampler=sampler, progress=progress
            ).greedy_rewards(result.prompts, 0, progress.stage)
    metrics, truth = result.metrics, None
    if networks is not None:
        batch, left_out = evaluated_heldout(config, result, baseline, networks)
        metrics |= value_metrics(batch, config.algorithm.gamma)
        if measured is not None:
            points = on_rows_of(measured[0], result.rollouts, batch)
            truth = beside_values(points, measured[1], batch.old_values, config, seed=config.seed)
        if page is not None:
            write_page(page, config, batch, left_out, tokenizer, path)
    for key, value in metrics.items():
        print(f"{key}: {value:.4f}")
    if truth is not None:
        print(describe_truth(truth.figures))
        metrics |= truth_metrics(truth)
    if page is not None:
        print(page)
    return metrics


def _checked(
    config: FitConfig, value_page: str | None, value_truth: int | None
) -> tuple[FitConfig, Path | None]:
    """The config with the number of continuations, and the page's path; before anything loads."""
    page = None if value_page is None else Path(value_page)
    if page is not None:
        check_request(page, config)
    if page is not None or value_truth is not None:
        estimator_of(config.algorithm)
        check_own_head(config)
    if value_truth is None:
        return config, page
    if value_truth < 2:
        raise UserError("--value_truth: one continuation says nothing of its noise; give 2 or more")
    if (problem := unlike_the_rollouts(config, "--value_truth", in_training=False)) is not None:
        raise UserError(problem.message)
    truth = replace(config.value_truth, num_continuations=value_truth)
    return replace(config, value_truth=truth), page


def measure_heldout(
    config: FitConfig,
    result: EvaluationResult,
    sampler: Sampler,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
) -> tuple[list[TruthPoint], int]:
    """Sample on from prefixes of the held-out responses, as those were sampled."""
    settings = evaluation_settings(config.evaluation, config.rollouts.max_response_tokens)
    batch = make_rollout_batch(
        result.rollouts,
        result.verdicts,
        group_size=result.k,
        rewards=config.rewards,
        max_response_tokens=config.rollouts.max_response_tokens,
    )
    return measure(
        batch,
        config,
        settings=settings,
        sampler=sampler,
        scorer=scorer,
        tokenizer=tokenizer,
        seed=derive_seed(config.evaluation.seed, "value truth"),
        stage=progress.stage,
        note=progress.note,
    )


def load_policy(config: FitConfig, checkpoint: Checkpoint | None = None) -> ActorAccess:
    """The actor of the config's folder, or of a checkpoint, for a sampling engine."""
    model = load_causal_lm(
        config.actor.path,
        dtype=config.actor.dtype,
        attn_implementation=config.actor.attn_implementation,
    )
    if checkpoint is not None:
        checkpoint.fill(model, "actor", config.actor.path)
    return access_to(model, pick_device(config.trainer))
