"""Which figure of a critic predicts the score that its policy reaches?

    python experiments/critics/truth_and_score.py SWEEP_FOLDER TRACKING_URI EXPERIMENT OUTPUT_FOLDER

For a finished sweep over methods with a critic: measures the truth about each run's pretrained
critic on the held-out prompts (`vapo validate --value_truth 8`; an output that is in the folder
already is read), and correlates each figure by ranks with the score at the end of the same row
and seed: over the methods (means over seeds), and over single runs, each less its seed's mean.
Writes table.md and figures.png.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import mlflow
from matplotlib import pyplot
from scipy.stats import spearmanr

from vapo.tracking.metric_groups import documented

FIGURES = {
    "critic/explained_variance": "explained variance of returns",
    "truth/explained": "explained, all prefixes",
    "truth/explained_within": "explained within responses",
    "truth/explained_between": "explained between prompts",
    "truth/flattening": "flattening",
    "truth/rank_agreement": "rank agreement of steps",
    "truth/mistake_recall": "recall of the first mistake",
    "truth/mistake_precision": "precision of the first mistake",
    "truth/mse": "squared error",
    "truth/bias": "bias",
}
DRAWN = ("truth/mistake_recall", "truth/explained_within", "critic/explained_variance")
SAME_QUESTION = [
    *("value_truth.num_responses=64", "value_truth.num_prefixes=0"),
    *("value_truth.segments.pattern=[+-]", "evaluation.k=4"),
]


@dataclass(frozen=True)
class Run:
    row: str
    seed: str
    score: float
    figures: Mapping[str, float]


def measured(run: Path, output: Path) -> dict[str, float]:
    """The figures of the pretrained critic that a run of the sweep started from."""
    if not output.exists() or "truth/mse" not in output.read_text():
        command = ["vapo", "validate", "--config", str(run / "config.yaml")]
        command += ["--value_truth", "8", *SAME_QUESTION]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        output.write_text(found.stdout)
    lines = re.findall(r"^(\w+/\w+): (-?[\d.]+)", output.read_text(), re.M)
    return dict.fromkeys(FIGURES, math.nan) | {key: float(value) for key, value in lines}


def scores(uri: str, experiment: str) -> dict[tuple[str, str], float]:
    """Held-out score at the end, in per cent, by row and seed."""
    client = mlflow.MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        raise SystemExit(f"no experiment {experiment} in {uri}")
    by_run = {}
    for run in client.search_runs([found.experiment_id], max_results=1000):
        row, _, seed = (run.info.run_name or "").rpartition("/")
        if run.info.status == "FINISHED" and row and not row.startswith("value pretraining"):
            by_run[row, seed] = 100 * documented(run.data.metrics)["eval/avg_at_k"]
    return by_run


def read(folder: Path, uri: str, experiment: str, output: Path) -> list[Run]:
    rows = {re.sub(r"\W+", "-", r["row"].lower()): r["row"]
            for r in json.loads((folder / "sweep.json").read_text())["rows"]}  # fmt: skip
    at_end, runs = scores(uri, experiment), []
    for pretraining in sorted(folder.glob("runs/value-pretraining-of-*")):
        name, seed = re.fullmatch(r"value-pretraining-of-(.*)-(\d+)_\w+", pretraining.name).groups()
        row = rows[name]
        (run,) = folder.glob(f"runs/{name}-{seed}_*")
        figures = measured(run, output / f"{name}-{seed}.txt")
        runs.append(Run(row, seed, at_end[row, seed], figures))
        print(f"{row}, seed {seed}", flush=True)
    return runs


def table(runs: Sequence[Run]) -> str:
    rows, seeds = defaultdict(list), defaultdict(list)
    for run in runs:
        rows[run.row].append(run)
        seeds[run.seed].append(run)
    score = {row: fmean(run.score for run in own) for row, own in rows.items()}
    lines = [
        f"{len(rows)} methods, {len(runs)} runs",
        "",
        "| figure after value pretraining | rank correlation with the score: methods | runs |",
        "|---|---:|---:|",
    ]
    for key, label in FIGURES.items():
        means = [fmean(run.figures[key] for run in own) for own in rows.values()]
        over_rows = spearmanr(means, list(score.values()), nan_policy="omit")
        centre = {s: fmean(run.figures[key] for run in own) for s, own in seeds.items()}
        level = {s: fmean(run.score for run in own) for s, own in seeds.items()}
        over_runs = spearmanr(
            [run.figures[key] - centre[run.seed] for run in runs],
            [run.score - level[run.seed] for run in runs],
            nan_policy="omit",
        )
        cells = (f"{r.statistic:+.2f} (p {r.pvalue:.2f})" for r in (over_rows, over_runs))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines += ["", f"| method | score | {' | '.join(FIGURES.values())} |"]
    lines.append("|---|" + "---:|" * (1 + len(FIGURES)))
    for row in sorted(rows, key=lambda row: -score[row]):
        cells = (f"{fmean(run.figures[key] for run in rows[row]):.2f}" for key in FIGURES)
        lines.append(f"| {row} | {score[row]:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(runs: Sequence[Run], keys: Sequence[str], output: Path) -> None:
    figure, axes = pyplot.subplots(1, len(keys), figsize=(13, 4.2), sharey=True, layout="tight")
    for axis, key in zip(axes, keys, strict=True):
        for number, row in enumerate(dict.fromkeys(run.row for run in runs)):
            own = [run for run in runs if run.row == row]
            x, y = [run.figures[key] for run in own], [run.score for run in own]
            axis.plot(x, y, "o", color=f"C{number % 10}", markersize=4)
            axis.annotate(row, (fmean(x), fmean(y)), fontsize=7, color=f"C{number % 10}")
        axis.set_xlabel(f"{FIGURES[key]}, after value pretraining")
    axes[0].set_ylabel("held-out score at the end, %")
    figure.savefig(output, dpi=110)


def main(folder: str, uri: str, experiment: str, output: str) -> None:
    where = Path(output)
    where.mkdir(parents=True, exist_ok=True)
    runs = read(Path(folder), uri, experiment, where)
    text = table(runs)
    (where / "table.md").write_text(text)
    draw(runs, DRAWN, where / "figures.png")
    print(text)


if __name__ == "__main__":
    main(*sys.argv[1:5])
