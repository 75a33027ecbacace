"""How much of the gradient's noise does the critic take away in each cell of the map?

    python experiments/critics/where_it_pays/noise.py

Each cell is one batch of 512 responses of the first policy, with the critic that `run.py` trained.
The two ratios compare the critic with the mean reward of the prompt's other responses.
The gain is that of the trusted critic in `results.jsonl`, ahead of the loss without a critic.
"""

from __future__ import annotations

import itertools
import json
import shutil
from statistics import fmean
from typing import Any

from run import FOLDER, GROUP_SIZES, RESULTS, SIZES, TRUSTED, VAPO, Cell, system_settings, task
from scipy.stats import spearmanr
from table import differences

import vapo

RATIOS = ("critic/gradient_noise_ratio", "critic/advantage_variance_ratio")
SEEDS = (0, 1, 2)
NUM_RESPONSES = 512
OUTPUT = FOLDER / "noise.json"


def ratios(size: int, group_size: int, seed: int) -> dict[str, float]:
    """Run one iteration of the cell, and return both ratios of its batch."""
    files, settings = system_settings(Cell(size, group_size, VAPO, seed))
    settings |= {
        "seed": seed,
        "training.num_iterations": 1,
        "components.group_sampling.num_prompts": NUM_RESPONSES // group_size,
        "components.group_sampling.group_size": group_size,
    }
    config = vapo.load_config(FOLDER / "task.yaml", *files, overrides=task(size) | settings)
    run = vapo.fit(config, quiet=True)
    metrics = run.metrics()
    shutil.rmtree(run.folder)
    return {name: metrics[name][0][1] for name in RATIOS}


def main() -> None:
    lines = RESULTS.read_text(encoding="utf-8").splitlines()
    runs = [row for row in map(json.loads, lines) if row["kind"] == "run" and row["seed"] in SEEDS]
    gains = differences(runs, TRUSTED)
    records: list[dict[str, Any]] = []
    for size, group_size in itertools.product(SIZES, GROUP_SIZES):
        of_seeds = [ratios(size, group_size, seed) for seed in SEEDS]
        means = {name: round(fmean(row[name] for row in of_seeds), 3) for name in RATIOS}
        gain = round(gains[size, group_size].mean, 2)
        records.append({"steps": size, "group_size": group_size, **means, "gain": gain})
        print(records[-1], flush=True)
    for name in RATIOS:
        result = spearmanr([row[name] for row in records], [row["gain"] for row in records])
        print(
            f"{name}: rank correlation with the gain {result.statistic:.2f}, p {result.pvalue:.3f}"
        )
    OUTPUT.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
