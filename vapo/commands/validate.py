"""`vapo validate`: the held-out score of a policy, from its folder or from a checkpoint."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from vapo.advantages.estimators import estimator_of
from vapo.config import FitConfig
from vapo.diagnostics.value_page.heldout import (
    check_request,
    heldout_batch,
    load_forward_networks,
    write_page,
)
from vapo.evaluation import evaluate, evaluation_settings
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.networks.own_head import check_own_head
from vapo.prompts.critic_prompts import with_critic_prompts
from vapo.prompts.load import load_prompts
from vapo.rewards.scorer import Scorer
from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.engines.selection import ActorAccess, access_to, check_engine, make_sampler
from vapo.runs.checkpoints import Checkpoint, read_checkpoint
from vapo.runs.run_dirs import find_checkpoint
from vapo.system.devices import pick_device, set_threads
from vapo.system.progress import Progress
from vapo.system.quiet import quiet_libraries


def run(
    config: FitConfig, *, ckpt_path: str | None = None, value_page: str | None = None
) -> dict[str, float]:
    """Evaluate and print every metric, one a line; then, if one is asked for, the page's path."""
    quiet_libraries()
    page = None if value_page is None else Path(value_page)
    if page is not None:
        check_request(page, config)
        estimator_of(config.algorithm)
        check_own_head(config)
    set_threads(config.trainer)
    check_engine(config)
    tokenizer = load_tokenizer(config.actor.path, key="actor.path")
    prompts = load_prompts(config.data, tokenizer)
    if page is not None:  # the page has the critic's values
        prompts = with_critic_prompts(prompts, config, tokenizer)
    path = None if ckpt_path is None else find_checkpoint(config.output_dir, ckpt_path)
    checkpoint = None if path is None else Checkpoint(path, read_checkpoint(path, verified=True))
    access, networks = load_policy(config, checkpoint), None
    if page is not None:
        networks = load_forward_networks(config, access.model, tokenizer, checkpoint, access.device)
    del checkpoint  # its contents need as much memory as the networks
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
        if page is not None:
            collection = RolloutCollection(
                config,
                prompts=prompts,
                scorer=scorer,
                sampler=sampler,
                progress=progress,
                tokenizer=tokenizer,
            )
            settings = evaluation_settings(config.evaluation, config.rollouts.max_response_tokens)
            batch, _ = collection.with_baselines(
                heldout_batch(config, result), settings, 0, progress.stage
            )
    metrics = result.metrics
    if page is not None and networks is not None:
        metrics |= write_page(page, config, batch, networks, tokenizer, path)
    for key, value in metrics.items():
        print(f"{key}: {value:.4f}")
    if page is not None:
        print(page)
    return metrics


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
