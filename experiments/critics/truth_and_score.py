"""Which figure of a critic predicts the score that its policy reaches?

    python experiments/critics/truth_and_score.py OUTPUT_FOLDER
    python experiments/critics/truth_and_score.py OUTPUT_FOLDER SWEEP_FOLDER TRACKING_URI EXPERIMENT

For a finished sweep over methods with a critic: measures the truth about each run's pretrained
critic on the held-out prompts (`vapo validate --value_truth 8`; an output that is in the folder
already is read) and writes methods.csv, a row a method: its score at the end and its critics'
figures, means over the seeds. Without a sweep it reads methods.csv. Then it correlates each figure
by ranks with the score over the methods, and writes table.md and figures.png.

The sample is the methods: seeds of one method are not independent of each other. Methods whose
numbers are all equal are one. A p value is the share of random pairings of figures and scores
whose correlation is at least as far from 0 (scipy's permutation test).
"""

from __future__ import annotations

import csv
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
import numpy as np
from matplotlib import pyplot
from scipy.stats import permutation_test, rankdata

from vapo.tracking.metric_names import by_present_name

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
NUM_PAIRINGS = 99_999


@dataclass(frozen=True)
class Method:
    """Means over its seeds; `name` has every method with the same numbers."""

    name: str
    score: float
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Correlation:
    """By ranks; `p` two-sided."""

    rho: float
    p: float

    def __str__(self) -> str:
        return f"{self.rho:+.2f} (p {self.p:.2f})"


def measured(run: Path, output: Path) -> dict[str, float]:
    """The figures of the pretrained critic that a run of the sweep started from."""
    if not output.exists() or "truth/mse" not in output.read_text():
        command = ["vapo", "validate", "--config", str(run / "config.yaml")]
        command += ["--value_truth", "8", *SAME_QUESTION]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        output.write_text(process.stdout)
    lines = re.findall(r"^(\w+/\w+): (-?[\d.]+)", output.read_text(), re.M)
    return dict.fromkeys(FIGURES, math.nan) | {key: float(value) for key, value in lines}


def scores(uri: str, experiment: str) -> dict[tuple[str, str], float]:
    """The held-out score at the end of each finished run, in per cent, by row and seed."""
    client = mlflow.MlflowClient(uri)
    record = client.get_experiment_by_name(experiment)
    if record is None:
        raise SystemExit(f"no experiment {experiment} in {uri}")
    by_run = {}
    for run in client.search_runs([record.experiment_id], max_results=1000):
        row, _, seed = (run.info.run_name or "").rpartition("/")
        if run.info.status == "FINISHED" and row and not row.startswith("value pretraining"):
            by_run[row, seed] = 100 * by_present_name(run.data.metrics)["eval/avg_at_k"]
    return by_run


def of_sweep(folder: Path, uri: str, experiment: str, output: Path) -> list[Method]:
    rows = {re.sub(r"\W+", "-", r["row"].lower()): r["row"]
            for r in json.loads((folder / "sweep.json").read_text())["rows"]}  # fmt: skip
    at_end, by_method = scores(uri, experiment), defaultdict(list)
    for pretraining in sorted(folder.glob("runs/value-pretraining-of-*")):
        match = re.fullmatch(r"value-pretraining-of-(.*)-(\d+)_\w+", pretraining.name)
        assert match is not None, pretraining
        name, seed = match.groups()
        row = rows[name]
        (run,) = folder.glob(f"runs/{name}-{seed}_*")
        by_method[row].append((at_end[row, seed], measured(run, output / f"{name}-{seed}.txt")))
        print(f"{row}, seed {seed}", flush=True)
    return [
        Method(
            name,
            fmean(score for score, _ in runs),
            {key: fmean(figures[key] for _, figures in runs) for key in FIGURES},
        )
        for name, runs in by_method.items()
    ]


def write(methods: Sequence[Method], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["method", "score", *FIGURES])
        writer.writerows([m.name, m.score, *m.figures.values()] for m in methods)


def read(path: Path) -> list[Method]:
    with path.open(newline="") as file:
        return [
            Method(row["method"], float(row["score"]), {key: float(row[key]) for key in FIGURES})
            for row in csv.DictReader(file)
        ]


def distinct(methods: Sequence[Method]) -> list[Method]:
    """Methods that differ in a number; those that do not are one, with all of their names."""
    names = defaultdict(list)
    for method in methods:
        names[method.score, tuple(method.figures.values())].append(method)
    return [
        Method(" = ".join(m.name for m in same), same[0].score, same[0].figures)
        for same in names.values()
    ]


def correlations_of_ranks(
    scores: np.ndarray, figure: Sequence[float] | np.ndarray, axis: int
) -> np.ndarray:
    """Spearman's: Pearson's of the ranks, for many orders of the scores at once."""
    x, y = rankdata(scores, axis=axis), rankdata(figure)
    x, y = x - x.mean(axis=axis, keepdims=True), y - y.mean()
    return np.tensordot(x, y, (axis, 0)) / np.sqrt((x**2).sum(axis=axis) * (y**2).sum())


def correlation(methods: Sequence[Method], key: str) -> Correlation:
    figure = [method.figures[key] for method in methods]
    test = permutation_test(
        ([method.score for method in methods],),
        lambda scores, axis: correlations_of_ranks(scores, figure, axis),
        permutation_type="pairings",
        vectorized=True,
        n_resamples=NUM_PAIRINGS,
        rng=np.random.default_rng(0),
    )
    return Correlation(float(test.statistic), float(test.pvalue))


def largest(methods: Sequence[Method], keys: Sequence[str]) -> Correlation:
    """The one furthest from 0, and how often chance has one so far among as many figures."""
    figures = [[method.figures[key] for method in methods] for key in keys]
    test = permutation_test(
        ([method.score for method in methods],),
        lambda scores, axis: np.max(
            [np.abs(correlations_of_ranks(scores, figure, axis)) for figure in figures], axis=0
        ),
        permutation_type="pairings",
        vectorized=True,
        n_resamples=NUM_PAIRINGS,
        alternative="greater",
        rng=np.random.default_rng(0),
    )
    return Correlation(float(test.statistic), float(test.pvalue))


def most_influential(methods: Sequence[Method], key: str) -> Method:
    """The method without which the correlation is nearest to 0, or furthest on the other side."""
    scores = np.array([method.score for method in methods])
    figure = np.array([method.figures[key] for method in methods])
    rho = float(correlations_of_ranks(scores, figure, 0))

    def without(number: int) -> float:
        rest = np.arange(len(methods)) != number
        return math.copysign(1, rho) * float(correlations_of_ranks(scores[rest], figure[rest], 0))

    return methods[min(range(len(methods)), key=without)]


def table(methods: Sequence[Method]) -> str:
    pairs = distinct(methods)
    same = [method.name for method in pairs if " = " in method.name]
    lines = [
        f"{len(methods)} methods, {len(pairs)} with numbers of their own"
        + (f" ({'; '.join(same)} in all of them)" if same else ""),
        "",
        "| figure after value pretraining | rank correlation with the score | without the method "
        "that it owes most to | |",
        "|---|---:|---:|---|",
    ]
    for key, label in FIGURES.items():
        left_out = most_influential(pairs, key)
        rest = [method for method in pairs if method is not left_out]
        cells = (str(correlation(pairs, key)), str(correlation(rest, key)), left_out.name)
        lines.append(f"| {label} | {' | '.join(cells)} |")
    far = largest(pairs, list(FIGURES))
    lines += [
        "",
        f"The largest of the {len(FIGURES)} is {far.rho:.2f} from 0; among as many figures chance "
        f"has one so far in {far.p:.0%} of the pairings.",
        "",
        f"| method | score | {' | '.join(FIGURES.values())} |",
        "|---|" + "---:|" * (1 + len(FIGURES)),
    ]
    for method in sorted(pairs, key=lambda method: -method.score):
        figures = (f"{method.figures[key]:.2f}" for key in FIGURES)
        lines.append(f"| {method.name} | {method.score:.1f} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def draw(methods: Sequence[Method], keys: Sequence[str], output: Path) -> None:
    figure, axes = pyplot.subplots(1, len(keys), figsize=(13, 4.4), sharey=True, layout="tight")
    for axis, key in zip(axes, keys, strict=True):
        left_out = most_influential(methods, key)
        for number, method in enumerate(methods):
            color = "#999999" if method is left_out else f"C{number % 7}"
            point = (method.figures[key], method.score)
            axis.plot(*point, "o", color=color, markersize=4)
            axis.annotate(
                method.name,
                point,
                (5 if number % 2 else -5, -2),  # neighbours in score on two sides
                textcoords="offset points",
                ha="left" if number % 2 else "right",
                fontsize=7,
                color=color,
            )
        axis.margins(x=0.35)
        rest = [method for method in methods if method is not left_out]
        axis.set_title(
            f"rank correlation {correlation(methods, key)}\n"
            f"without {left_out.name}: {correlation(rest, key)}",
            fontsize=9,
        )
        axis.set_xlabel(f"{FIGURES[key]}, after value pretraining")
    axes[0].set_ylabel("held-out score at the end, %")
    figure.savefig(output, dpi=110)


def main(output: str, *sweep: str) -> None:
    where = Path(output)
    if sweep:
        folder, uri, experiment = sweep
        where.mkdir(parents=True, exist_ok=True)
        write(of_sweep(Path(folder), uri, experiment, where), where / "methods.csv")
    methods = read(where / "methods.csv")
    text = table(methods)
    (where / "table.md").write_text(text)
    draw(distinct(methods), DRAWN, where / "figures.png")
    print(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
