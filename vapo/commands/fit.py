"""`vapo fit`: value pretraining, then the policy phase, with evaluation and recording."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from vapo.advantages.estimators import estimator_of
from vapo.commands.estimate import estimate_config
from vapo.commands.fit_end import describe_checkpoints, write_fit_summary
from vapo.commands.sampling import read_inputs
from vapo.config import FitConfig, resolve
from vapo.config.sources import default_name
from vapo.config.unread_changes import unread_changes
from vapo.config.written import flatten, to_yaml
from vapo.diagnostics.probe_notes import probe_notes
from vapo.diagnostics.reward_weight import reward_weight_notes
from vapo.errors import StoppedRun
from vapo.errors.shown_text import say
from vapo.files.made_folders import taken_back_if_refused
from vapo.networks.build import check_critic, check_head_is_kept, check_tokenizers
from vapo.networks.critic_folders import critic_path, critic_start
from vapo.networks.export import check_saving
from vapo.networks.model_configs import read_value_config
from vapo.prompts.critic_prompts import with_critic_prompts
from vapo.rewards.scorer import make_scorer
from vapo.rollouts.kept_rollouts import ResumeCache
from vapo.rollouts.stored_rollouts import open_stored
from vapo.runs.checkpoints import check_compatible, check_state
from vapo.runs.manifests import is_sharded, path_for_lightning, read_manifest
from vapo.runs.resuming import changed_keys, check_resumable, choose_resume, tell
from vapo.runs.run_dirs import FIRST_FILES, RunDir, open_run_dir
from vapo.runs.shard_index import check_shards
from vapo.runs.stopping import Stopping
from vapo.runs.summary import score_line
from vapo.studies.estimate.engine_beside import with_sleep_level
from vapo.studies.estimate.memory import MemoryEstimate
from vapo.studies.smoke.forecast import session_file
from vapo.studies.smoke.session import SmokeSession
from vapo.sweep.identity import code_version
from vapo.system.distributed import check_launch, leave_together
from vapo.system.libraries import pick_device
from vapo.system.process import is_main_process
from vapo.system.progress import Progress
from vapo.tracking.also import check_also
from vapo.tracking.inputs import dataset_inputs, model_tags, params, recorded_tracking
from vapo.tracking.logger import RunLogger
from vapo.training.parts import Inputs, Sampling, assemble_parts, module_of
from vapo.training.trainer import RunCallbacks, make_trainer

_FOLDER_CHARS = 48  # so that the folder's path has room on a line of 80 columns


def run(
    config: FitConfig,
    *,
    ckpt_path: str | None = None,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Logger] = (),
    quiet: bool = False,
    smoke_until: int | None = None,
) -> Path:
    """Train as the config says, and return the folder of the run.

    Args:
        callbacks, loggers: those of the user, in addition to the run's own.
        quiet: print warnings and errors alone.
        smoke_until: the run is one of a smoke test: it ends after this iteration, and its figures
            are written beside output_dir.

    Raises: StoppedRun: the run ended itself. Its summary is written before.
    """
    started = time.monotonic()
    check_also(config.tracking)
    for line in unread_changes(config) if quiet and is_main_process() else ():
        say(
            f"vapo: {line}", file=sys.stderr
        )  # begin_record prints these lines if the run is not quiet
    inputs = checked_inputs(config)
    resume = choose_resume(config, ckpt_path, tell)
    checkpoint = None if resume is None else resume.checkpoint
    if checkpoint is None:
        check_head_is_kept(config)
    else:
        check_resumable(checkpoint, config)
        check_compatible(read_manifest(checkpoint), config, name=str(checkpoint))
        check_state(checkpoint)
        if is_sharded(checkpoint):
            check_shards(checkpoint)
    if smoke_until is not None:
        file = session_file(Path(config.output_dir).parent, smoke_until)
        callbacks = [*callbacks, SmokeSession(smoke_until, file)]
    name = config.tracking.run_name or default_name(config, max_chars=_FOLDER_CHARS)
    with (
        closing(open_run_dir(config, name, resume=resume)) as run_dir,
        taken_back_if_refused(run_dir.new_folders, FIRST_FILES),
        Stopping(config.checkpoints.stop_grace_s) as stopping,
    ):
        return train(
            config,
            run_dir,
            checkpoint,
            inputs,
            stopping,
            started,
            callbacks,
            loggers,
            quiet=quiet,
            says_result=not quiet and smoke_until is None,
        )


def checked_inputs(config: FitConfig) -> Inputs:
    """Check the config against the machine; return tokenizer, prompts and stored rollouts.

    Raises: UserError: one of them does not fit the config or the machine.
    """
    check_launch(config.trainer)
    pick_device(config.trainer)
    estimator_of(config.algorithm)
    check_critic(config)
    tokenizer, prompts = read_inputs(config)
    check_tokenizers(config, tokenizer)
    if resolve(config).value_pretraining_iterations > 0:  # value pretraining saves the critic
        path = critic_path(config)
        check_saving(read_value_config(path, config.critic), tokenizer, path)
    prompts = with_critic_prompts(prompts, config, tokenizer)
    return Inputs(tokenizer, prompts, open_stored(config, tokenizer))


def train(
    config: FitConfig,
    run_dir: RunDir,
    checkpoint: Path | None,
    inputs: Inputs,
    stopping: Stopping,
    started: float,
    own_callbacks: Sequence[Callback],
    own_loggers: Sequence[Logger],
    *,
    quiet: bool,
    says_result: bool,
) -> Path:
    """Train and write the summary, once everything has been checked. Return the run's folder."""
    with (
        Progress(enabled=False if quiet else None) as progress,
        make_scorer(config) as scorer,
        RunLogger(
            recorded_tracking(config),
            run_name=config.tracking.run_name or default_name(config),
            run_id=run_dir.mlflow_run_id,
            tags=run_tags(config),
            note=progress.note,
            journal=run_dir.path / "tracking",
            loggers=own_loggers,
        ) as logger,
    ):
        progress.poll = stopping.poll
        begin_record(config, run_dir, inputs, logger, progress)
        module = module_of(config, inputs)
        train_set = inputs.prompts.train
        kept_rollouts = (
            ResumeCache(run_dir, train_set) if config.checkpoints.keep_rollouts else None
        )
        parts = assemble_parts(
            module,
            Sampling(
                with_sleep_level(config, _memory, progress.note),
                inputs,
                scorer,
                progress,
                kept_rollouts,
                run_dir=run_dir,
            ),
            progress=progress,
            critic_dir=run_dir.path / "pretrained_critic",
            stored=inputs.stored,
            safe_point=stopping.safe_point,
        )
        callbacks = RunCallbacks(
            parts, run_dir, logger, progress, inputs.tokenizer, stopping, kept_rollouts
        )
        callbacks.add(own_callbacks)
        trainer = make_trainer(parts, callbacks.in_order, logger)
        path = None if checkpoint is None else path_for_lightning(checkpoint)
        stop: StoppedRun | None = None
        try:
            with closing(parts.datamodule), callbacks.peers.ends_clearly(run_dir):
                # Lightning restores weights, optimizers, schedules and callbacks from `path`
                trainer.fit(module, parts.datamodule, ckpt_path=path, weights_only=True)
                leave_together()
            scores = callbacks.evaluation
            if line := score_line(scores.first, scores.latest, config.evaluation.k):
                logger.describe_score(line)  # the first line of the run's description
        except StoppedRun as stopped:
            stop = StoppedRun(f"{stopped}; {describe_checkpoints(run_dir.checkpoints)}")
            logger.set_tags({"stopped": str(stop)})
            logger.close("FAILED")
    seconds = time.monotonic() - started
    if is_main_process():
        summary = write_fit_summary(config, module, callbacks, run_dir, logger, seconds, stop)
        if says_result:
            say(summary)
    run_dir.record("finished" if stop is None else "stopped", logger.run_id)
    if stop is not None:
        raise stop
    return run_dir.path


def _memory(config: FitConfig) -> MemoryEstimate:
    return estimate_config(config, tell=lambda line: None)[1]


def begin_record(
    config: FitConfig,
    run_dir: RunDir,
    inputs: Inputs,
    logger: RunLogger,
    progress: Progress,
) -> None:
    """Record the config and the data of the run, and print what the user should know of them."""
    run_dir.record("running", logger.run_id)
    prompts, stored = inputs.prompts, inputs.stored
    if run_dir.is_same_config:
        logger.skip_recorded()
    else:
        progress.note(
            "the config is not the one that this run had before "
            f"({', '.join(changed_keys(run_dir, config))}): steps after the checkpoint that "
            "were recorded before are recorded once more"
        )
        run_dir.replace_config(config)
    logger.log_config(to_yaml(config), params(config))
    logger.log_inputs(dataset_inputs(config, prompts))
    progress.note(prompts.report.describe())
    for line in (*unread_changes(config), *reward_weight_notes(config), *probe_notes(config)):
        progress.note(line)
    per_iteration = resolve(config).num_prompts
    if len(prompts.train) < per_iteration:
        progress.note(
            f"an iteration takes {per_iteration} prompts (components.group_sampling.num_prompts), "
            f"and there are {len(prompts.train)}: some come more than once in it"
        )
    if stored is not None:
        progress.note(stored.describe())
        logger.set_tags({"data/value_pretraining": f"{stored.name} ({stored.digest})"})


def run_tags(config: FitConfig) -> dict[str, str]:
    """Return the MLflow tags by which a report tells runs apart and the UI filters them."""
    critic = critic_start(config) if config.algorithm.has_critic else None
    return {
        "command": "fit",
        "code": code_version(),
        **{
            f"component/{key.removesuffix('.enabled')}": "on" if value else "off"
            for key, value in flatten(config.components).items()
            if key.endswith(".enabled")
        },
        **model_tags(config, critic),
    }
