"""`vapo sweep`: a grid of rows and seeds, each run a process; then the report."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vapo.config.written import written_source
from vapo.errors import UserError
from vapo.sweep.describe import describe_size, dry_run_lines
from vapo.sweep.folders import locked
from vapo.sweep.grid import read_grid
from vapo.sweep.identity import code_version
from vapo.sweep.launch import Launcher, LocalLauncher, visible_gpus
from vapo.sweep.plan import Plan, make_plan
from vapo.sweep.slurm import SlurmLauncher
from vapo.sweep.work import Work
from vapo.tracking.provenance import git_state


@dataclass(frozen=True)
class SweepOptions:
    """The command's flags. `jobs` None: 1 on this host, no limit on a cluster."""

    files: Sequence[Path]
    grid: Path
    seeds: Sequence[int]
    overrides: Sequence[str] = ()
    jobs: int | None = None
    dry_run: bool = False
    launcher: str = "local"
    slurm: Mapping[str, str] = field(default_factory=dict)
    sweep_dir: Path | None = None
    report: bool = True


def run(options: SweepOptions) -> None:
    """Run what has not been run, and write the report into the parent run.

    Raises: UserError at the end if runs failed; the others have been run.
    """
    plan = make_plan(read_grid(options.grid), options.files, options.overrides, options.seeds)
    default_dir = Path(plan.base.output_dir) / f"sweep_{plan.grid.name}"
    sweep_dir = (options.sweep_dir or default_dir).expanduser().absolute()
    if options.dry_run:
        print("\n".join(dry_run_lines(plan, sweep_dir)))
        return
    with locked(sweep_dir) as lock:
        _work(plan, sweep_dir, options, lock)


def _work(plan: Plan, sweep_dir: Path, options: SweepOptions, lock: int) -> None:
    from vapo.sweep.recording import Parent

    launcher, jobs = _launcher(plan, sweep_dir, options, lock)
    print(describe_size(plan))
    state = git_state(Path(__file__).parent)
    if state.get("git/dirty") == "true":
        print("note: the checkout has uncommitted changes; the code's digest identifies the runs")
    parent = Parent(plan, sweep_dir, command_line(options))
    work = Work(
        plan.tasks,
        sweep_dir,
        launcher,
        jobs,
        prepare=parent.child_config,
        ended=parent.ended,
        abandoned=parent.abandoned,
        provenance={**state, "code": code_version()},
    )
    status = "FAILED"
    try:
        outcomes = work.run()
        if options.report and any(o.state == "finished" for o in outcomes.values()):
            from vapo.commands import report

            report.run(
                report.ReportOptions(
                    sweep=parent.run_id,
                    tracking_uri=parent.tracking_uri,
                    output_dir=sweep_dir / "report",
                )
            )
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        print("interrupted; the same command goes on where it stopped", flush=True)
        raise
    finally:
        parent.close(status)
    print(f"parent run {parent.run_id}; sweep folder:\n{sweep_dir}")
    _raise_if_failed(plan, {identity: o.state for identity, o in outcomes.items()})


def _raise_if_failed(plan: Plan, states: Mapping[str, str]) -> None:
    failed = [task.name for task in plan.tasks if states[task.identity] != "finished"]
    if failed:
        raise UserError(
            f"{len(failed)} of {len(plan.tasks)} runs did not finish: {', '.join(failed)}; the "
            "same command tries them again"
        )


def _launcher(
    plan: Plan, sweep_dir: Path, options: SweepOptions, lock: int
) -> tuple[Launcher, int]:
    if options.launcher == "slurm":
        jobs = options.jobs or len(plan.tasks)
        return SlurmLauncher(sweep_dir / "slurm", options.slurm), jobs
    if options.slurm:
        raise UserError("--slurm has no effect without --launcher slurm")
    jobs = options.jobs or 1
    gpus = [] if plan.base.trainer.accelerator == "cpu" else visible_gpus()
    return LocalLauncher(jobs, gpus=gpus, keep_open=lock), jobs


def command_line(options: SweepOptions) -> str:
    """The command that repeats this sweep; credentials come from the environment then."""
    words = ["vapo", "sweep"]
    for file in options.files:
        words += ["--config", str(file)]
    words += ["--grid", str(options.grid), "--seeds", ",".join(map(str, options.seeds))]
    overrides = (override.partition("=") for override in options.overrides)
    return shlex.join([*words, *(f"{key}={written_source(text)}" for key, _, text in overrides)])
