"""`vapo fit`: value pretraining, then the policy phase, with evaluation and recording."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vapo.callbacks.diagnostics import PositionDiagnostics
from vapo.callbacks.evaluation import Evaluation
from vapo.callbacks.overlap import RolloutOverlap
from vapo.callbacks.profiling import Profiling
from vapo.callbacks.recording import Recording
from vapo.callbacks.value_pretraining import ValuePretraining
from vapo.callbacks.weight_sync import WeightSync, actor_weights
from vapo.config import FitConfig, resolve
from vapo.config.loading import config_hash, flatten, to_yaml
from vapo.console import quiet_libraries
from vapo.datamodule import RolloutDataModule
from vapo.devices import pick_device, set_threads
from vapo.distributed import check_launch
from vapo.inputs import dataset_inputs, model_tags, params
from vapo.minibatches import TokenInputs
from vapo.models import check_same_tokenizer, load_tokenizer
from vapo.module import VapoModule
from vapo.networks import critic_path
from vapo.progress import Progress
from vapo.prompts import load_prompts
from vapo.rewards import make_scorer
from vapo.rollouts.selection import ActorAccess, check_engine, make_sampler
from vapo.run_dirs import RunDir, check_resumable, find_checkpoint, open_run_dir
from vapo.strategies import gathered, lightning_precision, make_strategy
from vapo.summary import make_summary, render_summary, write_summary
from vapo.tracking import RunLogger, make_run_logger


@dataclass(frozen=True)
class FitResult:
    """What a run came to, for callers in Python."""

    run_dir: Path
    before: dict[str, float]
    after: dict[str, float]


def run(config: FitConfig, *, ckpt_path: str | None = None) -> FitResult:
    """Train; returns the folder of the run and the first and last evaluation."""
    started = time.monotonic()
    quiet_libraries()
    check_launch(config.trainer)
    set_threads(config.trainer)
    pick_device(config.trainer)
    check_engine(config)
    tokenizer = load_tokenizer(config.actor.path)
    check_tokenizers(config, tokenizer)
    prompts = load_prompts(config.data, tokenizer)
    checkpoint = None if ckpt_path is None else find_checkpoint(config.output_dir, ckpt_path)
    if checkpoint is not None:
        check_resumable(checkpoint, config.trainer)
    name = config.tracking.run_name or f"vapo-seed{config.seed}"
    run_dir = open_run_dir(config, name, resume_from=checkpoint)
    critic = critic_path(config) if config.algorithm.has_critic else None
    with (
        Progress() as progress,
        make_scorer(
            config.rewards,
            max_response_tokens=config.rollouts.max_response_tokens,
            data=config.data,
        ) as scorer,
        make_run_logger(
            config.tracking,
            run_name=name,
            run_id=run_dir.mlflow_run_id,
            tags={"command": "fit", **component_tags(config), **model_tags(config, critic)},
            note=progress.note,
        ) as logger,
    ):
        run_dir.record_mlflow_run(logger.run_id)
        logger.log_config(to_yaml(config), params(config))
        logger.log_inputs(dataset_inputs(config, prompts))
        progress.note(prompts.report.describe())
        module = VapoModule(config, pad_id=int(tokenizer.pad_token_id))
        datamodule = RolloutDataModule(
            config,
            prompts=prompts,
            scorer=scorer,
            make_sampler=lambda module: make_sampler(config, actor_access(module), tokenizer),
            progress=progress,
            pad_id=module.pad_id,
        )
        evaluation = Evaluation(logger, progress)
        trainer = make_trainer(config, module, evaluation, logger, progress, run_dir)
        with closing(datamodule):
            trainer.fit(module, datamodule, ckpt_path=checkpoint)
    run_path = Path(trainer.strategy.broadcast(str(run_dir.path)))
    if trainer.is_global_zero:
        seconds = time.monotonic() - started
        recording = next(c for c in trainer.callbacks if isinstance(c, Recording))  # type: ignore[attr-defined]
        print(summarize(config, module, evaluation, recording, run_dir, seconds))
    return FitResult(run_path, evaluation.first, evaluation.latest)


def summarize(
    config: FitConfig,
    module: VapoModule,
    evaluation: Evaluation,
    recording: Recording,
    run_dir: RunDir,
    seconds: float,
) -> str:
    """Write summary.json; the text that ends the command, whose last line is the run's folder."""
    logger = recording.logger
    summary = make_summary(
        before=evaluation.first,
        after=evaluation.latest,
        k=config.evaluation.k,
        num_iterations=int(module.iteration),
        stage_seconds=recording.progress.stage_seconds,
        profile=recording.profile.describe(),
        total_seconds=seconds,
        mlflow_run_id=logger.run_id,
        mlflow_experiment_id=logger.experiment_id,
        tracking_uri=config.tracking.uri,
        config_hash=config_hash(config),
        undelivered_records=logger.close(),
    )
    write_summary(run_dir.path, summary)
    best = run_dir.checkpoints / "best.ckpt"
    return render_summary(
        summary,
        run_dir.path,
        recorded=logger.describe(),
        ablation=(
            "components.value_pretraining.enabled=false"
            if resolve(config).value_pretraining_iterations
            else None
        ),
        checkpoint=best,
    )


def check_tokenizers(config: FitConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """A critic that reads other token ids than the actor writes would be silently wrong."""
    if config.algorithm.has_critic:
        path = critic_path(config)
        if path != config.actor.path:
            check_same_tokenizer(tokenizer, load_tokenizer(path))


def component_tags(config: FitConfig) -> dict[str, str]:
    """One tag for each component: on or off."""
    flat = flatten(config.components)
    return {
        f"component/{key.removesuffix('.enabled')}": "on" if value else "off"
        for key, value in flat.items()
        if key.endswith(".enabled")
    }


def actor_access(module: VapoModule) -> ActorAccess:
    """What a sampling engine needs of the module's own actor."""

    def logprobs(inputs: TokenInputs) -> Tensor:
        with module.trainer.precision_plugin.forward_context():
            return inputs.scatter(module.actor(inputs, temperature=1.0)[0])

    return ActorAccess(
        model=module.actor.model,
        device=module.device,
        weights=lambda: actor_weights(module),
        logprobs=logprobs,
        gather=lambda: gathered(module.actor),
        local_rank=module.local_rank,
    )


def make_trainer(
    config: FitConfig,
    module: VapoModule,
    evaluation: Evaluation,
    logger: RunLogger,
    progress: Progress,
    run_dir: RunDir,
) -> L.Trainer:
    """Lightning's Trainer: one epoch is one iteration, checkpoints at the iteration's end."""
    pretraining = module.hyperparameters.value_pretraining_iterations if module.has_critic else 0
    every_n = config.trainer.checkpoint_every_n_iterations
    callbacks: list[Callback] = [
        RolloutOverlap(),
        ValuePretraining(
            config.components.value_pretraining,
            num_iterations=pretraining,
            critic_dir=run_dir.path / "pretrained_critic",
            progress=progress,
        ),
        WeightSync(progress),
        evaluation,
        Recording(logger, progress),
        PositionDiagnostics(logger),
        # one for each: `save_last` would follow the best, and leave last.ckpt behind
        make_checkpointing(run_dir, "last", every_n_iterations=every_n),
        make_checkpointing(run_dir, "best", every_n_iterations=1, monitor="eval/avg_at_k"),
    ]
    if config.trainer.profile:
        callbacks.append(Profiling(run_dir.path, progress))
    return L.Trainer(
        accelerator=config.trainer.accelerator,
        devices=config.trainer.devices,
        num_nodes=config.trainer.num_nodes,
        strategy=make_strategy(config.trainer),
        precision=lightning_precision(config.trainer),
        max_epochs=pretraining + config.training.num_iterations,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=logger,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def make_checkpointing(
    run_dir: RunDir, name: str, *, every_n_iterations: int, monitor: str | None = None
) -> ModelCheckpoint:
    """Keeps one file `name`.ckpt: the newest, or the one with the highest `monitor`."""
    return ModelCheckpoint(
        dirpath=run_dir.checkpoints,
        filename=name,
        monitor=monitor,
        mode="max",
        save_top_k=1,
        every_n_epochs=every_n_iterations,
        save_on_train_epoch_end=True,
        enable_version_counter=False,
    )
