"""`vapo sweep`: a grid of rows and seeds, each run a process; then the report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from vapo.commands.file_checks import check_run
from vapo.config.unread_changes import check_rows_are_read
from vapo.config.written import written_source
from vapo.errors import StopRequested, UserError, about
from vapo.errors.shown_text import say
from vapo.sweep.folders import TaskFolder, describe_finished, locked
from vapo.sweep.grid import choose_rows, read_grid
from vapo.sweep.launch import Launcher, LocalLauncher, SlurmLauncher, visible_gpus
from vapo.sweep.plan import Plan, describe_plan, describe_size, make_plan
from vapo.sweep.work import TaskRunner
from vapo.tracking.provenance import git_state


def run(
    *,
    config: Sequence[Path],
    grid: Path,
    seeds: Sequence[int],
    overrides: Sequence[str] = (),
    rows: Sequence[str] = (),
    jobs: int | None = None,
    dry_run: bool = False,
    launcher: Literal["local", "slurm"] = "local",
    slurm: Sequence[tuple[str, str]] = (),
    sweep_dir: Path | None = None,
    no_report: bool = False,
) -> None:
    """Run each row of a grid with each seed, unless that run has finished, and report on them.

    Each run is a process. The report is written beside them and into MLflow's parent run.

    Raises: UserError: some runs failed. It is raised at the end, after all others have run.
    """
    if slurm and launcher != "slurm":
        raise UserError(
            "--slurm is not read without --launcher slurm: add it, or leave --slurm out"
        )
    whole_grid = read_grid(grid)
    plan = make_plan(choose_rows(whole_grid, rows), config, overrides, seeds)
    check_rows_are_read(plan.row_configs)
    default_dir = Path(plan.base.output_dir) / f"sweep_{plan.grid.name}"
    folder = (sweep_dir or default_dir).expanduser().absolute()
    to_do = [task for task in plan.tasks if TaskFolder(folder, task).finished() is None]
    for name in dict.fromkeys(task.row.name for task in to_do):
        with about(f"row '{name}' of the grid"):
            check_run(plan.row_configs[name])
    command = command_line(config, grid, seeds, overrides, rows)
    if dry_run:
        say("\n".join([describe_plan(plan, command), "", *describe_finished(plan, folder)]))
        return
    if whole_grid.full_system != plan.grid.full_system:
        say(f"note: no row is compared: --rows leaves out {whole_grid.full_system}")
    with locked(folder) as lock:
        if launcher == "slurm":
            jobs = jobs or len(plan.tasks)
            start: Launcher = SlurmLauncher(folder / "slurm", dict(slurm))
        else:
            jobs = jobs or 1
            gpus = [] if plan.base.trainer.accelerator == "cpu" else visible_gpus()
            start = LocalLauncher(jobs, gpus=gpus, keep_open=lock)
        _work(plan, folder, command, start, jobs, not no_report)


def _work(
    plan: Plan, sweep_dir: Path, command: str, launcher: Launcher, jobs: int, with_report: bool
) -> None:
    from vapo.sweep.recording import ParentRun

    say(describe_size(plan))
    say(f"logs: {sweep_dir}/runs/<row>-<seed>_<identity>/log.txt")
    if git_state(Path(__file__).parent).get("git/dirty") == "true":
        say("note: the checkout has uncommitted changes; the code's digest identifies the runs")
    parent = ParentRun(plan, sweep_dir, command)
    work = TaskRunner(
        plan.tasks,
        sweep_dir,
        launcher,
        jobs,
        prepare=parent.child_config,
        on_end=parent.record_end,
        abandoned=parent.abandoned,
    )
    parent.note = work.display.line  # notes stand above the lines of the running tasks
    status = "FAILED"
    try:
        outcomes = work.run()
        if with_report and any(o.state == "finished" for o in outcomes.values()):
            from vapo.commands import report

            report.run(
                sweep=parent.run_id,
                tracking_uri=parent.store.uri,
                output_dir=sweep_dir / "report",
            )
        status = "FINISHED"
    except (KeyboardInterrupt, StopRequested):
        status = "KILLED"
        say("interrupted; the same command resumes where it stopped")
        raise
    finally:
        parent.close(status)
    if page := parent.curves_page():
        say(f"the scores of its runs, side by side:\n  {page}")
    say(f"parent run {parent.run_id}; open its table:\n  {parent.how_to_open()}")
    say(f"sweep folder:\n{sweep_dir}")
    if not (missing := [t for t in plan.tasks if outcomes[t.identity].state != "finished"]):
        return
    failed = [task for task in missing if outcomes[task.identity].state == "failed"]
    logs = [f"  {task.name}: {TaskFolder(sweep_dir, task).log}" for task in failed]
    names = ", ".join(task.name for task in missing)
    text = f"{len(missing)} of {len(plan.tasks)} runs did not finish: {names}; the same command "
    raise UserError("\n".join([f"{text}tries them again; logs of those that failed:", *logs]))


def command_line(
    files: Sequence[Path],
    grid: Path,
    seeds: Sequence[int],
    overrides: Sequence[str],
    rows: Sequence[str] = (),
) -> str:
    """Return the shell command that repeats this sweep.

    Credentials stand in it as the environment variables that have them.
    """
    words = ["vapo", "sweep", *(word for file in files for word in ("--config", str(file)))]
    words += ["--grid", str(grid), "--seeds", ",".join(map(str, seeds))]
    words += [word for text in rows for word in ("--rows", text)]
    split_overrides = (override.partition("=") for override in overrides)
    return shlex.join(
        [*words, *(f"{key}={written_source(text)}" for key, _, text in split_overrides)]
    )
