"""What the table of a sweep does not say: scores on the way, tokens, what the critics knew by turn.

    python experiments/environments/figures.py SWEEP_FOLDER

Differences are to the first row, paired by seed, with 95 % intervals: at the end, and at the last
evaluation that all rows have. The tokens are those that a row's runs sampled for training, those of
its value pretraining included. The explained variance is that of the pretrained critic on the last
rollouts of its pretraining, by sampled token of an episode; a turn of a tug of war has two.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from mlflow import MlflowClient

from vapo import open_run
from vapo.sweep.report.estimates import estimate_over_seeds


def main(folder: Path) -> None:
    contents = json.loads((folder / "sweep.json").read_text())
    pretrainings = {run["identity"]: run for run in contents["value_pretrainings"]}
    print_scores([run for run in contents["runs"] if run["state"] == "finished"])
    for row in [entry["row"] for entry in contents["rows"]]:
        row_runs = [
            run for run in contents["runs"] if run["row"] == row and run["state"] == "finished"
        ]
        pretraining_runs = [pretrainings[run["needs"]] for run in row_runs if run["needs"]]
        print(f"{row}: seeds {', '.join(str(run['seed']) for run in row_runs)}")
        tokens = [
            sum(history(run, "rollout/num_response_tokens"))
            for run in [*row_runs, *pretraining_runs]
        ]
        print(f"  sampled tokens a seed: {sum(tokens) / len(row_runs):,.0f}")
        if pretraining_runs:
            print("  explained variance by token:", by_token(pretraining_runs))


def print_scores(runs: list[dict[str, Any]]) -> None:
    """Held-out scores in per cent at each evaluation, the first one before training."""
    scores: dict[str, list[list[float]]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        percentages = [100 * score for score in history(run, "eval/avg_at_k")]
        scores.setdefault(run["row"], []).append(percentages)
    common = min(len(curve) for curves in scores.values() for curve in curves)
    first = next(iter(scores.values()))
    for row, curves in scores.items():
        print(f"{row}: scores", ", ".join(f"{mean(at):.1f}" for at in zip(*curves, strict=True)))
        for name, place in (("end", -1), (f"evaluation {common}", common - 1)):
            gaps = [
                curve_points[place] - other[place]
                for curve_points, other in zip(curves, first, strict=True)
            ]
            gap = estimate_over_seeds(gaps).text("+")
            print(f"  at its {name}, difference to {next(iter(scores))}: {gap}")


def client(run: dict[str, Any]) -> MlflowClient:
    summary = json.loads((Path(run["run_dir"]) / "summary.json").read_text())
    return MlflowClient(summary["tracking_uri"])


def history(run: dict[str, Any], key: str) -> list[float]:
    return [value for _, value in open_run(run["run_dir"]).metrics()[key]]


def by_token(runs: list[dict[str, Any]]) -> str:
    """The mean over runs, for each bin that all of them have with 100 tokens or more."""
    columns = []
    for run in runs:
        last = max(f.path for f in client(run).list_artifacts(run["mlflow_run_id"], "diagnostics"))
        path = client(run).download_artifacts(run["mlflow_run_id"], last)
        columns.append(json.loads(Path(path).read_text())["columns"])
    parts = []
    for place, position in enumerate(columns[0]["position"]):
        if all(len(c["position"]) > place and c["num_tokens"][place] >= 100 for c in columns):
            explained = mean(c["explained_variance"][place] for c in columns)
            parts.append(f"{position}: {explained:.2f}")
    return ", ".join(parts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
