"""Which figure of the value truth predicts the score that a critic's policy reaches?

    python experiments/critics/truth_and_score.py TRACKING_URI EXPERIMENT OUTPUT.png

Reads a sweep over methods with a critic whose runs measured the truth in the first iteration of
the policy, before any update of it (`value_truth.every_n_iterations=100`). For each figure: its
rank correlation over the methods, means over seeds, with the score at the end; and the same over
single runs, each less its seed's mean. Prints a table and draws the three figures that say most.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from statistics import fmean

import mlflow
import numpy as np
from matplotlib import pyplot
from scipy.stats import spearmanr

SCORE = "eval/avg_at_k"
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


def read_runs(uri: str, experiment: str) -> list[dict[str, object]]:
    """Row, seed, score at the end and the first value of each figure, of finished runs."""
    client = mlflow.MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None, f"no experiment {experiment} in {uri}"
    runs = []
    for run in client.search_runs([found.experiment_id], max_results=1000):
        name = run.info.run_name or ""
        if "/" not in name or name.startswith("value pretraining"):
            continue
        if run.info.status != "FINISHED" or "truth/mse" not in run.data.metrics:
            continue
        row, _, seed = name.rpartition("/")
        figures = {}
        for key in FIGURES:
            history = sorted(client.get_metric_history(run.info.run_id, key), key=lambda m: m.step)
            figures[key] = history[0].value if history else float("nan")
        runs.append(
            {"row": row, "seed": seed, "score": 100 * run.data.metrics[SCORE], "figures": figures}
        )
    return runs


def main(uri: str, experiment: str, output: str) -> None:
    runs = read_runs(uri, experiment)
    rows, seeds = defaultdict(list), defaultdict(list)
    for run in runs:
        rows[run["row"]].append(run)
        seeds[run["seed"]].append(run)
    scores = {row: fmean(run["score"] for run in own) for row, own in rows.items()}
    of_seed = {seed: fmean(run["score"] for run in own) for seed, own in seeds.items()}
    print(f"{len(rows)} methods, {len(runs)} runs\n")
    print("| figure before the policy's first update | methods | runs |")
    print("|---|---:|---:|")
    strength, means = {}, {}
    for key, label in FIGURES.items():
        means[key] = {row: fmean(run["figures"][key] for run in own) for row, own in rows.items()}
        over_rows = spearmanr([means[key][row] for row in rows], [scores[row] for row in rows])
        centre = {s: fmean(run["figures"][key] for run in own) for s, own in seeds.items()}
        over_runs = spearmanr(
            [run["figures"][key] - centre[run["seed"]] for run in runs],
            [run["score"] - of_seed[run["seed"]] for run in runs],
        )
        strength[key] = abs(over_rows.statistic)
        print(
            f"| {label} | {over_rows.statistic:+.2f} (p {over_rows.pvalue:.2f}) "
            f"| {over_runs.statistic:+.2f} (p {over_runs.pvalue:.2f}) |"
        )
    print("\n| method | score | " + " | ".join(FIGURES.values()) + " |")
    print("|---|" + "---:|" * (1 + len(FIGURES)))
    for row in sorted(rows, key=lambda row: -scores[row]):
        cells = " | ".join(f"{means[key][row]:.2f}" for key in FIGURES)
        print(f"| {row} | {scores[row]:.1f} | {cells} |")
    draw(output, rows, scores, means, sorted(strength, key=lambda key: -strength[key])[:3])


def draw(output, rows, scores, means, keys) -> None:
    figure, axes = pyplot.subplots(1, len(keys), figsize=(12, 4), sharey=True, layout="tight")
    for axis, key in zip(np.atleast_1d(axes), keys, strict=True):
        for row in rows:
            axis.plot(means[key][row], scores[row], "o", color="C0")
            axis.annotate(row, (means[key][row], scores[row]), fontsize=7, xytext=(3, 3),
                          textcoords="offset points")  # fmt: skip
        axis.set_xlabel(f"{FIGURES[key]}, after value pretraining")
    np.atleast_1d(axes)[0].set_ylabel("held-out score at the end, %")
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:4])
