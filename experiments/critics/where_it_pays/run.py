"""The runs of the map: steps x group size x system x seed, each as a line of a results file.

    python experiments/critics/where_it_pays/run.py --sizes 6,12 --seeds 0,1,2 --jobs 2

Policies must lie in `runs/where_it_pays/policies` (README.md has the commands). A critic is trained
once for each number of steps and seed, on responses of the first policy. A second start does what
is missing. Each run is scored after 12 iterations, and the one without a critic at lambda 1 goes
on for as many responses as the critic was trained on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
WORK = ROOT / "runs/where_it_pays"
RESULTS = FOLDER / "results.jsonl"
RESPONSES = 32  # an iteration, of all systems and group sizes
ITERATIONS = 12
SCORED = 4  # the last policies, whose mean is the score
CRITIC_RESPONSES = 256
EXTRA_ITERATIONS = CRITIC_RESPONSES // RESPONSES
# Passes over the stored responses, until those held out are explained no better.
PASSES = {"num_iterations": 1000, "epochs": 30, "patience": 5, "heldout_share": 0.2, "lr": 3.0e-4}
SIZES = (6, 12, 24, 48)
GROUP_SIZES = (1, 2, 4, 8)
ACTOR_RATE = 2.0e-4
VAPO, TRUSTED = "VAPO", "trusted"
LAMBDA_1, BY_LENGTH = "without a critic, lambda 1", "without a critic, lambda by length"
BATCH_MEAN = "without a critic, the batch's mean"  # a run of its own: --systems
SYSTEMS = (LAMBDA_1, VAPO, TRUSTED, BY_LENGTH)
PER_ITERATION = (
    "rollout/accuracy",
    "rollout/response_length_mean",
    "critic/explained_variance",
    "baseline/within_weight",
    "baseline/known_at_end",
    "baseline/first_value_weight",
)


@dataclass(frozen=True)
class Cell:
    """One run. `alpha` and `rate` are set by trials alone."""

    size: int
    group_size: int
    system: str
    seed: int
    rate: float | None = None
    alpha: float | None = None


def task(size: int) -> dict[str, Any]:
    """The overrides that a number of steps needs."""
    steps = {
        f"data.{split}.options.{end}_steps": size
        for split, end in itertools.product(("train", "heldout"), ("min", "max"))
    }
    return steps | {
        "actor.path": str(WORK / f"policies/{size}"),
        "actor.optimizer.lr": ACTOR_RATE,
        "rollouts.max_response_tokens": 4 * size + 6,
        "tracking.uri": str(WORK / f"mlruns/{os.getpid()}"),  # the processes share no database
    }


def system_settings(cell: Cell) -> tuple[list[Path], dict[str, Any]]:
    """The config files and overrides that make a system of the task's config."""
    if cell.system in (VAPO, TRUSTED):
        files = [ROOT / "conf/algorithm/trusted.yaml"] if cell.system == TRUSTED else []
        critic = str(WORK / f"critics/{cell.size}_{cell.seed}/critic")
        settings = {"critic.init": critic, "components.value_pretraining.enabled": False}
        if cell.alpha is not None:
            settings["components.length_adaptive_gae.alpha"] = cell.alpha
        return files, settings
    by_length = cell.system == BY_LENGTH
    alpha = (cell.alpha or 0.15) if by_length else None
    extra = EXTRA_ITERATIONS if cell.system == LAMBDA_1 else 0
    return [ROOT / "conf/algorithm/milestones.yaml"], {
        "algorithm.advantage_estimator": "function",
        "algorithm.estimator_function": f"{FOLDER}/others_mean.py:estimate",
        "algorithm.estimator_args": {"alpha": alpha, "whole_batch": cell.system == BATCH_MEAN},
        "algorithm.estimator_compares_groups": cell.group_size > 1 and cell.system != BATCH_MEAN,
        "components.length_adaptive_gae.enabled": False,  # the function has its own lambda
        "training.num_iterations": ITERATIONS + extra,
    }


def train_critic(size: int, seed: int) -> dict[str, Any]:
    """Sample responses of the first policy, and train the critic of the size and seed on them."""
    import vapo
    from vapo.commands import rollouts

    started, folder = time.monotonic(), WORK / f"critics/{size}_{seed}"
    shared: dict[str, Any] = {"seed": 1_000_000 + seed, "output_dir": str(folder)}
    shared |= {"components.group_sampling.num_prompts": RESPONSES}
    shared |= {"components.group_sampling.group_size": 1, "training.num_iterations": 0}
    stored = folder / "rollouts.parquet"
    config = vapo.load_config(FOLDER / "task.yaml", overrides=task(size) | shared)
    if not stored.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        rollouts.run(config, num=CRITIC_RESPONSES, output=str(stored))
    shared |= {f"components.value_pretraining.{name}": value for name, value in PASSES.items()}
    shared["components.value_pretraining.data"] = str(stored)
    config = vapo.load_config(FOLDER / "task.yaml", overrides=task(size) | shared)
    run = vapo.fit(config, quiet=True)
    (folder / "critic").symlink_to(next(run.folder.glob("*critic*")).resolve())
    explained = [value for _, value in run.metrics()["critic/heldout_explained_variance"]]
    return {
        "kind": "critic",
        "size": size,
        "seed": seed,
        "heldout_explained_variance": explained,
        "seconds": round(time.monotonic() - started, 1),
    }


def run_cell(cell: Cell) -> dict[str, Any]:
    """Train one run, and say what came of it."""
    from scoring import Scoring

    import vapo

    started = time.monotonic()
    files, settings = system_settings(cell)
    settings |= {
        "seed": cell.seed,
        "components.group_sampling.num_prompts": RESPONSES // cell.group_size,
        "components.group_sampling.group_size": cell.group_size,
    }
    if cell.rate is not None:
        settings["actor.optimizer.lr"] = cell.rate
    config = vapo.load_config(FOLDER / "task.yaml", *files, overrides=task(cell.size) | settings)
    windows = {"": range(ITERATIONS - SCORED + 1, ITERATIONS + 1)}
    if (last := config.training.num_iterations) > ITERATIONS:
        windows["later_"] = range(last - SCORED + 1, last + 1)
    scoring = Scoring(windows, PER_ITERATION)
    vapo.fit(config, callbacks=[scoring], quiet=True)
    seconds = round(time.monotonic() - started, 1)
    return vars(cell) | scoring.result | {"kind": "run", "seconds": seconds}


def results() -> list[dict[str, Any]]:
    """What is done already."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return [json.loads(line) for line in lines]


def cells(
    sizes: Sequence[int], groups: Sequence[int], systems: Sequence[str], seeds: Sequence[int]
) -> Iterator[Cell]:
    """Yield the cells in the order of work. Group sizes 1 and 8, the outer ones, come first."""
    for seed in seeds:
        for group in sorted(groups, key=lambda g: g not in (1, 8)):
            for size, system in itertools.product(sizes, systems):
                if system != BY_LENGTH or group in (1, 8):
                    yield Cell(size, group, system, seed)


def work(todo: Sequence[tuple[Any, tuple[Any, ...]]], jobs: int) -> None:
    """Call the functions in processes of their own, and write down what each returns."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {pool.submit(function, *args): args for function, args in todo}
        for number, future in enumerate(as_completed(futures), 1):
            result = future.result()
            with RESULTS.open("a") as file:
                file.write(json.dumps(result) + "\n")
            score = result.get("score", result.get("heldout_explained_variance"))
            progress_text = (
                f"{number} of {len(todo)}, {result['seconds']} s: {futures[future]} {score}"
            )
            print(progress_text, flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=numbers, default=list(SIZES))
    parser.add_argument("--groups", type=numbers, default=list(GROUP_SIZES))
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--systems", type=lambda text: text.split(";"), default=list(SYSTEMS))
    parser.add_argument("--rates", type=lambda text: [float(part) for part in text.split(",")])
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    finished_rows = results()
    has_critic = {(row["size"], row["seed"]) for row in finished_rows if row["kind"] == "critic"}
    critics = [c for c in itertools.product(options.sizes, options.seeds) if c not in has_critic]
    work([(train_critic, row) for row in critics], options.jobs)
    requested = cells(options.sizes, options.groups, options.systems, options.seeds)
    if options.rates:  # trials, from which ACTOR_RATE is chosen
        requested = (replace(c, rate=rate) for c in requested for rate in options.rates)
    names = [field.name for field in fields(Cell)]
    have = {Cell(*(row[name] for name in names)) for row in finished_rows if row["kind"] == "run"}
    missing = [cell for cell in requested if cell not in have]
    work([(run_cell, (cell,)) for cell in missing], options.jobs)


if __name__ == "__main__":
    main()
