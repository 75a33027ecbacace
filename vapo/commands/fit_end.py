"""The end of `vapo fit`: its summary, and what the user can open and run next."""

from __future__ import annotations

from pathlib import Path

from vapo.config import FitConfig, resolve
from vapo.config.functions import names_a_notebooks_function
from vapo.config.written import config_hash
from vapo.diagnostics.watchers import useless_critic
from vapo.errors import StoppedRun
from vapo.runs.run_dirs import RunDir, newest_first
from vapo.runs.summary import (
    SUMMARY_NAME,
    RunSummary,
    render_summary,
    shown_path,
    unjudged,
    write_summary,
)
from vapo.tracking.links import run_page
from vapo.tracking.logger import RunLogger
from vapo.tracking.stores import locate_store
from vapo.training.module import VapoModule
from vapo.training.trainer import RunCallbacks
from vapo.types import Phase


def write_fit_summary(
    config: FitConfig,
    module: VapoModule,
    callbacks: RunCallbacks,
    run_dir: RunDir,
    logger: RunLogger,
    seconds: float,
    stop: StoppedRun | None,
) -> str:
    """Write summary.json. Return the command's last text, whose last line is the run's folder."""
    recording, watch = callbacks.recording, callbacks.watch
    score_best, best_iteration = callbacks.checkpointing.best
    after_pretraining, at_end = (
        callbacks.knowledge.after(phase)
        for phase in (Phase.VALUE_PRETRAINING, Phase.POLICY_OPTIMIZATION)
    )
    warnings = dict(watch.warnings)
    if (why := useless_critic(config.watch, after_pretraining, at_end)) is not None:
        warnings["explained_variance"] = why  # it says more than the watcher
    summary = RunSummary(
        evaluation_before=dict(callbacks.evaluation.first),
        evaluation_after=dict(callbacks.evaluation.latest),
        fresh=dict(callbacks.prompt_scores.fresh),
        average_policy=dict(callbacks.average.latest),
        critic_after_pretraining=after_pretraining,
        critic_at_end=at_end,
        critic_was_held_out=callbacks.knowledge.heldout is not None,
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
        score_best=score_best,
        best_iteration=best_iteration,
        status="FAILED" if stop else "FINISHED",
        stopped="" if stop is None else str(stop),
        warnings=[*warnings.values(), *unjudged(callbacks.evaluation.latest)],
        faults=dict(watch.faults.totals),
    )
    write_summary(run_dir.path, summary)
    return render_summary(
        summary,
        run_dir.path,
        recorded=f"in MLflow's experiment '{config.tracking.experiment}' as '{logger.run_name}'",
        ablation=(
            "components.value_pretraining.enabled=false"
            if resolve(config).value_pretraining_iterations
            else None
        ),
        config_is_whole=not names_a_notebooks_function(config),
        value_page=latest_value_page(config.tracking.uri, logger, callbacks.value_pages.latest),
        other_run=run_before(run_dir),
    )


def latest_value_page(tracking_uri: str, logger: RunLogger, latest: str) -> str | None:
    """Return the path of the run's last value page, or its address on a server.

    `latest` is the name of the last page that this process wrote. Returns None where the run has
    no page, or where the store shows none.
    """
    store = locate_store(tracking_uri)
    folder = store.artifact_folder(logger.run_id, "value_pages")
    if folder is not None:
        pages = sorted(folder.glob("*.html"))
        return shown_path(pages[-1]) if pages else None
    if not store.is_http or not latest or not logger.run_id or not logger.experiment_id:
        return None
    page = f"artifacts/{latest}"
    return run_page(store.shown_uri, logger.experiment_id, logger.run_id, page)


def run_before(run_dir: RunDir) -> Path | None:
    """Return the folder of the finished run beside this one that began last before it, or None."""
    runs = newest_first(run_dir.path.parent)
    earlier = runs[runs.index(run_dir.path) + 1 :] if run_dir.path in runs else []
    return next((path for path in earlier if (path / SUMMARY_NAME).is_file()), None)


def describe_checkpoints(folder: Path) -> str:
    """Return a text on the checkpoints from which a run that stopped itself can resume."""
    last, best = folder / "last.ckpt", folder / "best.ckpt"
    if not last.exists():
        return "there is no checkpoint from before it"
    best_too = f"; best score: {best}" if best.exists() else ""
    return f"checkpoint from before it: {last}{best_too}"
