"""What does a critic that is destroyed on purpose cost, with and without a trusted baseline?

    python experiments/critics/destroyed.py TASK --seeds 0,1,2,3 [--minutes 60] [KEY=VALUE ...]
    python experiments/critics/destroyed.py --table

Each run is VAPO with values that are spoiled between the critic and the advantages, once with
`algorithm.baseline.kind=critic` and once with `trusted`; one more run has VAPO's loss without a
critic and lambda 1. The product has no option for this: the script puts its own function around
`estimate_advantages` in its own process. The critic itself trains as ever, because its targets are
returns (lambda 1), which no value reaches.

All runs of a task and seed start from one critic, pretrained once, and sample the same prompts.
Each run is added to destroyed/results.json when it ends, and a second start runs what is missing.
The table and the figure are then written anew.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from destroyed_table import BASELINES, OUTPUT, read_rows, write_report  # beside this file
from torch import Tensor

import vapo
from vapo.config import FitConfig
from vapo.sweep.plan import pretraining_config, start_from_critic
from vapo.system.process import derive_seed
from vapo.training import iteration
from vapo.types import EvaluatedBatch, Phase, TrainingBatch

ROOT = Path(__file__).parents[2]
RUNS = Path("runs/destroyed")
TASKS = {  # of each its config
    "default": ROOT / "conf/vapo.yaml",
    "missed checks": ROOT / "conf/missed_checks/vapo.yaml",
    "longer missed checks": ROOT / "conf/longer_missed_checks/vapo.yaml",
    "tug of war": ROOT / "conf/tug_of_war/vapo.yaml",
}
FRESH_BATCHES = 8
SMALL = (  # scored at both ends only, on many prompts; nothing is kept but what is recorded here
    "data.heldout.num_examples=512",
    "evaluation.num_prompts=512",
    "evaluation.k=2",
    "evaluation.every_n_iterations=100000",
    "value_pages.every_n_iterations=null",
    "checkpoints.every_n_iterations=100000",
    "checkpoints.keep_rollouts=false",
    "tracking.experiment=destroyed",
    f"tracking.uri={RUNS}/mlruns",
)

Spoiler = Callable[[Tensor, EvaluatedBatch, torch.Generator], Tensor]


# ---- values that are spoiled ----------------------------------------------------------------


def turned_round(values: Tensor, batch: EvaluatedBatch, generator: torch.Generator) -> Tensor:
    """Mirror the values at the batch's mean value: they are high where they were low."""
    return 2 * values[batch.counted_mask].mean() - values


def of_another_response(
    values: Tensor, batch: EvaluatedBatch, generator: torch.Generator
) -> Tensor:
    """Take each token's value from a response to the next prompt; after its end, its last value."""
    spoiled = values.clone()
    of_each = [values[row][batch.response_mask[row]] for row in range(len(batch))]
    for row, row_values in enumerate(of_each):
        other = of_each[(row + batch.group_size) % len(batch)]
        if len(other):
            places = torch.arange(len(row_values)).clamp(max=len(other) - 1)
            spoiled[row, batch.response_mask[row]] = other[places]
    return spoiled


def noisy(values: Tensor, batch: EvaluatedBatch, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise with a standard deviation of 0.5 to each token's value."""
    return values + 0.5 * torch.randn(values.shape, generator=generator, dtype=values.dtype)


SPOILERS: dict[str, Spoiler] = {
    "as they are": lambda values, batch, generator: values,
    "turned round": turned_round,
    "another response's": of_another_response,
    "shifted by 0.5": lambda values, batch, generator: values + 0.5,
    "noise of 0.5": noisy,
    "a constant": lambda values, batch, generator: torch.zeros_like(values),
}


@contextmanager
def spoiled_values(kind: str, seed: int) -> Iterator[None]:
    """Inside it advantages are computed with spoiled values; value pretraining is as ever."""
    sound, spoil = iteration.estimate_advantages, SPOILERS[kind]
    generator = torch.Generator().manual_seed(derive_seed(seed, "spoiled values"))

    def with_spoiled(
        batch: EvaluatedBatch, phase: Phase, config: FitConfig, *more: Any, **named: Any
    ) -> TrainingBatch:
        if phase is Phase.POLICY_OPTIMIZATION and batch.old_values is not None:
            mask = batch.response_mask
            spoiled = spoil(batch.values, batch, generator)
            batch = replace(batch, old_values=torch.where(mask, spoiled, batch.values))
        return sound(batch, phase, config, *more, **named)

    iteration.estimate_advantages = with_spoiled
    try:
        yield
    finally:
        iteration.estimate_advantages = sound


# ---- runs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One run: what is done to the values, and the baseline; without a critic both are empty."""

    task: str
    seed: int
    values: str
    baseline: str

    @property
    def key(self) -> tuple[Any, ...]:
        return self.task, self.seed, self.values, self.baseline


def cases(task: str, seeds: Sequence[int], baselines: Sequence[str]) -> list[Case]:
    """Seed by seed, so that whatever has ended is paired."""
    cells = [("", ""), *((kind, name) for kind in SPOILERS for name in baselines)]
    return [Case(task, seed, values, baseline) for seed in seeds for values, baseline in cells]


WITHOUT_A_CRITIC = (
    "components.value_pretraining.enabled=false",
    "components.decoupled_gae.enabled=false",
    "components.length_adaptive_gae.enabled=false",
    "algorithm.advantage_estimator=leave_one_out",
)


def config_of(case: Case, overrides: Sequence[str]) -> FitConfig:
    """Raises: UserError where the values would reach the critic's own loss."""
    baseline_overrides = (
        (f"algorithm.baseline.kind={case.baseline}",) if case.baseline else WITHOUT_A_CRITIC
    )
    where = f"output_dir={RUNS / case.task.replace(' ', '_')}"
    config = vapo.load_config(
        TASKS[case.task],
        overrides=[*SMALL, where, *baseline_overrides, *overrides, f"seed={case.seed}"],
    )
    component = config.components.decoupled_gae
    if case.baseline and (config.critic.value_clip or component.lambda_critic != 1):
        raise vapo.UserError(
            "spoiled values would reach the critic's own targets: set critic.value_clip=null and "
            "components.decoupled_gae.lambda_critic=1"
        )
    return config


def pretrained(config: FitConfig, task: str) -> Path:
    """The critic that all runs of a task and seed start from; it is trained once and kept."""
    folder = RUNS / f"{task.replace(' ', '_')}_critics/{config.seed}"
    if not folder.exists():
        run = vapo.fit(pretraining_config(config, config), quiet=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        (run.folder / "pretrained_critic").rename(folder)
        shutil.rmtree(run.folder)
    return folder


def run(case: Case, overrides: Sequence[str]) -> dict[str, Any]:
    config = config_of(case, overrides)
    if case.baseline:
        config = start_from_critic(config, str(pretrained(config, case.task)))
    start = time.monotonic()
    with spoiled_values(case.values or "as they are", case.seed):
        finished = vapo.fit(config, quiet=True)
    metrics = {
        name: [round(value, 4) for _, value in values]
        for name, values in finished.metrics().items()
        if name.startswith(RECORDED)
    }
    accuracy = metrics["rollout/accuracy"]
    shutil.rmtree(finished.folder)
    return {
        **vars(case),
        "before": finished.score_before,
        "after": finished.score_after,
        "fresh": statistics.fmean(accuracy[-FRESH_BATCHES:]),
        "seconds": round(time.monotonic() - start, 1),
        "overrides": list(overrides),
        "metrics": metrics,
    }


RECORDED = ("rollout/accuracy", "rollout/response_length_mean", "critic/explained", "baseline/")


def run_missing(
    cases: Sequence[Case],
    output: Path,
    minutes: float,
    call: Callable[[Case], dict[str, Any]],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run what the file lacks, in order, and add each run when it ends.

    None is begun once the minutes are over.
    """
    end = clock() + 60 * minutes
    finished_cells = {(r["task"], r["seed"], r["values"], r["baseline"]) for r in read_rows(output)}
    missing = [case for case in cases if case.key not in finished_cells]
    for number, case in enumerate(missing, start=1):
        if clock() > end:
            print(f"{len(missing) - number + 1} runs are left: the time is over")
            return
        row = call(case)
        output.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(line_row) for line_row in [*read_rows(output), row])
        partial = output.with_suffix(".partial")
        partial.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        partial.replace(output)
        name = f"{case.values or 'no critic'}, {case.baseline or 'others mean'}"
        scores = f"{100 * row['after']:.1f} held out, {100 * row['fresh']:.1f} fresh"
        place = f"[{number}/{len(missing)}] {case.task}, seed {case.seed}"
        print(f"{place}, {name}: {scores}, {row['seconds']} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("task", nargs="?", choices=list(TASKS), help="none: with --table")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--baselines", nargs="+", choices=BASELINES, default=list(BASELINES))
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--table", action="store_true", help="write table and figure alone")
    options = parser.parse_intermixed_args()
    if not options.table and options.task is None:
        parser.error("which task? --table needs none")
    if options.task is not None:
        seeds = list(map(int, options.seeds.split(",")))
        run_missing(
            cases(options.task, seeds, options.baselines),
            options.output,
            options.minutes,
            lambda case: run(case, options.overrides),
        )
    print(write_report(options.output))


if __name__ == "__main__":
    main()
