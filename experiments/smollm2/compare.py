"""A comparison on worked sums in one command, on a CPU or a GPU: every row of a grid, every seed.

    python experiments/smollm2/compare.py [GRID] [--seeds 0,1] [--jobs 2] [--minutes 60]
        [--rows NAME ...] [--output FILE] [KEY=VALUE ...]
    python experiments/smollm2/compare.py [GRID] --tune --seeds 100,101

GRID is comparison.yaml unless another one is named. Each run is added to the output when it ends,
and a second start goes on: finished runs are kept, others resume from their last checkpoint if they
have one. The rows of a seed come together, those of `FIRST` with all seeds before the others, and
rows whose pretrained critics would be the same start from one critic (`vapo sweep` says when).

`--tune` runs each row at several learning rates, and at several alphas where it has lambda by
length, and writes the best on fresh prompts into settings.yaml, which later comparisons read.
Its seeds must be others than the comparison's.

A job is a process that takes one run after the other: what imports, CUDA's start and compiled
kernels cost is paid once. A job whose engine is vLLM is started anew for each run. `--toy` tries
all of it with the default task's small policy.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from collect import means, row_of, show_on_pages, table, write_rows  # beside this file
from jobs import Jobs
from tuning import FRESH_BATCHES, best_settings, tuned, with_settings

from vapo.config import FitConfig
from vapo.config.checkpoints import config_identity
from vapo.config.written import flatten, to_yaml
from vapo.sweep.grid import choose_rows, read_grid
from vapo.sweep.plan import Plan, Task, make_plan, set_key

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BASE = ROOT / "conf/worked_sums/vapo.yaml"
COLD_START = ROOT / "conf/worked_sums/sft.yaml"
START, POLICY = ROOT / "models/smollm2_135m", ROOT / "models/worked_sums/policy"
SETTINGS = HERE / "settings.yaml"
FIRST = (
    "GRPO",
    "VAPO without a critic",
    "VAPO",
    "VAPO, trusted",
    "VAPO with a probe, trusted",
)

AGAINST = ("GRPO", "VAPO without a critic", "VAPO")  # a table of differences from each

SCORED = (
    "data.heldout.num_examples=512",
    "evaluation.num_prompts=512",
    "evaluation.k=2",
    "value_pages.every_n_iterations=null",
)
ON_DEVICE = {
    "cpu": ("evaluation.every_n_iterations=1000",),  # before and after: 1,024 responses each
    "gpu": (
        "trainer.accelerator=gpu",
        "evaluation.every_n_iterations=4",
        "rollouts.max_concurrent_sequences=512",
        "checkpoints.every_n_iterations=1000",
        "checkpoints.keep_rollouts=false",
    ),
}
TOY_BASE = ROOT / "conf/vapo.yaml"
TOY = (
    "data.heldout.num_examples=8",
    "evaluation.num_prompts=8",
    "components.group_sampling.num_prompts=2",
    "components.group_sampling.group_size=4",
    "components.value_pretraining.num_iterations=1",
    "components.value_pretraining.min_iterations=1",
    "training.minibatch_size=4",
    "actor.lora.rank=2",
    "critic.init=policy",
    "critic.layers=2",
    "critic.sampled_logprobs.lr=0.03",
    "trainer.num_threads=1",
)
TOY_LAST = ("training.num_iterations=2", "critic.minibatch_size=null")  # of rows, too


# ---- what is run ----------------------------------------------------------------------------


def in_order(plan: Plan) -> list[Task]:
    """Rows of `FIRST` with every seed, then the others; a seed's pretrainings before its rows."""
    first = [row.name for row in plan.grid.rows if row.name.partition(" | ")[0] in FIRST]
    other_rows = [row.name for row in plan.grid.rows if row.name not in first]
    by_identity = {task.identity: task for task in plan.tasks}
    ordered: dict[str, Task] = {}
    for names in (first, other_rows):
        for seed in plan.seeds:
            runs = [by_identity[plan.assigned[name, seed]] for name in names]
            for task in runs:
                if task.needs is not None:
                    ordered.setdefault(task.needs, by_identity[task.needs])
            ordered |= {task.identity: task for task in runs if task.identity not in ordered}
    return list(ordered.values())


# ---- what came of it ------------------------------------------------------------------------


class Record(NamedTuple):
    """The output's rows, and what they say of the grid's settings."""

    path: Path
    device: str

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        if self.path.exists():
            rows = json.loads(self.path.read_text(encoding="utf-8"))
        return rows

    def lacks(self, row: str, seed: int, settings: str) -> bool:
        """Raises: SystemExit: it has this row and seed with other settings."""
        same = [r for r in self.rows() if (r["system"], r["seed"]) == (row, seed)]
        if any(r.get("settings", settings) != settings for r in same):
            raise SystemExit(
                f"{self.path} has '{row}', seed {seed}, with other settings: name another --output"
            )
        return not same

    def add(self, row: Mapping[str, Any]) -> None:
        rows = sorted(
            [*self.rows(), row], key=lambda record_row: (record_row["system"], record_row["seed"])
        )
        write_rows(rows, self.path)


def settings_of(plan: Plan, row: str, seed: int) -> str:
    return config_identity(flatten(replace(plan.row_configs[row], seed=seed)))


@dataclass
class Comparison:
    """Runs the tasks of a plan, and adds each to the record when it ends.

    `folder` has a folder for each run, in which it is found again after an interruption.
    """

    plan: Plan
    folder: Path
    record: Record

    def missing(self) -> list[Task]:
        """The missing tasks in order, without pretrainings that no missing run needs."""
        names = {identity: key for key, identity in self.plan.assigned.items()}
        ordered = in_order(self.plan)
        runs = [
            task
            for task in ordered
            if not task.is_pretraining
            and self.record.lacks(*names[task.identity], self._settings(task))
        ]
        pretrainings = {task.needs for task in runs}
        identities = {task.identity for task in runs} | pretrainings
        return [task for task in ordered if task.identity in identities]

    def _settings(self, task: Task) -> str:
        return settings_of(self.plan, task.row.name, task.seed)

    def critic_of(self, identity: str) -> Path | None:
        """The run folder of a finished value pretraining."""
        summaries = sorted((self.folder / identity).glob("*/summary.json"))
        return summaries[-1].parent if summaries else None

    def is_ready(self, task: Task) -> bool:
        return task.needs is None or self.critic_of(task.needs) is not None

    def config_file(self, task: Task) -> Path:
        """The run's config: its output folder is its own, and it resumes what is there."""
        output_dir = self.folder / task.identity
        output_dir.mkdir(parents=True, exist_ok=True)
        config: FitConfig = replace(task.config, output_dir=str(output_dir))
        config = set_key(config, "checkpoints.resume", "auto")
        config = set_key(config, "tracking.uri", str(self.folder / "mlruns"))
        if task.needs is not None:
            config = set_key(
                config, "critic.init", f"{self.critic_of(task.needs)}/pretrained_critic"
            )
        path = output_dir / "config.yaml"
        path.write_text(to_yaml(config), encoding="utf-8")
        return path

    def ended(self, task: Task, run: Path, seconds: float) -> str:
        """A line of what came of it."""
        if task.is_pretraining:
            return f"{task.name}: {seconds:.0f} s"
        pretraining = None if task.needs is None else self.critic_of(task.needs)
        row = row_of(run, task.row.name, pretraining)
        provenance = {"settings": self._settings(task), "device": self.record.device}
        self.record.add({**row, **provenance, "seconds": round(seconds, 1)})
        fresh = row["accuracy"][-FRESH_BATCHES:]
        return (
            f"{task.name}: {seconds:.0f} s, held out {100 * row['before']:.1f} to "
            f"{100 * row['after']:.1f}, fresh {100 * sum(fresh) / len(fresh):.1f}"
        )


def run_all(
    comparison: Comparison,
    jobs: Jobs,
    minutes: float,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Run what is missing until the minutes are over; then what still runs is ended.

    Returns: a line for each run that failed or is left.
    """
    start = clock()
    waiting, failed = comparison.missing(), []
    total, num_done = len(waiting), 0
    broken: set[str] = set()
    while (waiting or jobs.running) and clock() - start < 60 * minutes:
        for task in list(waiting):
            if task.needs in broken:
                waiting.remove(task)
                failed.append(f"{task.name}: its value pretraining failed")
            elif jobs.has_room and comparison.is_ready(task):
                waiting.remove(task)
                jobs.start(task, comparison.config_file(task))
        for task, outcome in jobs.ended(wait_s=0.5):
            num_done += 1
            if outcome.run is None:
                broken.add(task.identity)
                failed.append(f"{task.name}: {outcome.reason}; log: {outcome.log}")
                line = failed[-1]
            else:
                line = comparison.ended(task, outcome.run, outcome.seconds)
            print(f"[{num_done}/{total}, {(clock() - start) / 60:.1f} min] {line}", flush=True)
    unfinished = [*(task.name for task in jobs.running), *(task.name for task in waiting)]
    jobs.end()
    return [
        *failed,
        *([f"not run, the time is over: {', '.join(unfinished)}"] if unfinished else []),
    ]


# ---- the command ----------------------------------------------------------------------------


def make_policy(device: str) -> None:
    """The cold start, unless it is there: minutes on a CPU, 40 seconds on an H200."""
    if (POLICY / "model.safetensors").exists():
        return
    if not (START / "config.json").exists():
        raise SystemExit(f"{START} is not there: `make smollm2` makes it, or copy the folder")
    on_device = f"trainer.accelerator={device}"
    command = ["-m", "vapo", "sft", "--config", str(COLD_START), on_device]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)


def planned(options: argparse.Namespace, device: str) -> Plan:
    base, last = (TOY_BASE, TOY_LAST) if options.toy else (BASE, ())
    overrides = [*SCORED, *ON_DEVICE[device], *(TOY if options.toy else ()), *options.overrides]
    seeds = list(map(int, options.seeds.split(",")))
    grid = choose_rows(read_grid(options.grid), options.rows)
    if options.tune:
        grid = tuned(grid, make_plan(grid, [base], overrides, seeds[:1]))
    elif options.settings.exists():
        settings = yaml.safe_load(options.settings.read_text(encoding="utf-8"))
        rows = tuple(with_settings(row, settings.get(row.name, {})) for row in grid.rows)
        grid = replace(grid, rows=rows)
    rows = tuple(replace(row, overrides=(*row.overrides, *last)) for row in grid.rows)
    return make_plan(replace(grid, rows=rows), [base], overrides, seeds)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="[GRID] [KEY=VALUE ...]")
    parser.add_argument("--seeds", default="0,1,2,3")
    parser.add_argument("--rows", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (a GPU takes 16)")
    parser.add_argument("--minutes", type=float, default=100_000)
    parser.add_argument("--output", type=Path, help="where the rows go (results_GRID.json)")
    parser.add_argument("--folder", type=Path, help="where the runs go (runs/compare/OUTPUT)")
    parser.add_argument("--settings", type=Path, default=SETTINGS)
    parser.add_argument("--device", choices=list(ON_DEVICE))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--policies", type=int, default=0, help="keep the adapters of the last N")
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    grids = [text for text in options.overrides if text.endswith(".yaml") and "=" not in text]
    options.overrides = [text for text in options.overrides if text not in grids]
    options.grid = Path(grids[0]) if grids else HERE / "comparison.yaml"
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    device = options.device or ("gpu" if shutil.which("nvidia-smi") else "cpu")
    if not options.toy:
        make_policy(device)
    plan = planned(options, device)
    place = Path("build/compare") if options.toy else HERE
    output = options.output or place / f"results_{plan.grid.name}_{device}.json"
    folder = options.folder or Path("runs/compare") / output.stem
    comparison = Comparison(plan, folder.absolute(), Record(output, device))
    is_vllm = plan.base.rollouts.engine == "vllm"
    jobs = Jobs(options.jobs, folder, runs_each=1 if is_vllm else None, policies=options.policies)
    lines = run_all(comparison, jobs, options.minutes)
    rows = comparison.record.rows()
    if rows and options.tune:
        settings = best_settings(rows)
        text = yaml.safe_dump(settings, sort_keys=False)
        (output.with_suffix(".yaml") if options.toy else options.settings).write_text(text)
        print(text)
    elif rows:
        show_on_pages(rows, output.stem)
        names = [name for name in AGAINST if any(row["system"] == name for row in rows)]
        print("", *(means(rows, against=name) for name in names), table(rows), sep="\n")
    print("\n".join([*lines, f"{len(rows)} rows in {output}"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
