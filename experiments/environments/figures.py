"""What the table of a sweep does not say: sampled tokens, and what the critics knew by turn.

    python experiments/environments/figures.py SWEEP_FOLDER

The tokens are those that a row's runs sampled for training, those of its value pretraining
included. The explained variance is that of the pretrained critic on the last rollouts of its
pretraining, by sampled token of an episode; a turn has three tokens, or four.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from mlflow import MlflowClient

from vapo.tracking.metric_groups import stored_key


def main(folder: Path) -> None:
    contents = json.loads((folder / "sweep.json").read_text())
    pretrainings = {run["identity"]: run for run in contents["value_pretrainings"]}
    for row in [entry["row"] for entry in contents["rows"]]:
        own = [run for run in contents["runs"] if run["row"] == row and run["state"] == "finished"]
        before = [pretrainings[run["needs"]] for run in own if run["needs"]]
        print(f"{row}: seeds {', '.join(str(run['seed']) for run in own)}")
        tokens = [sum(history(run, "rollout/num_tokens")) for run in [*own, *before]]
        print(f"  sampled tokens a seed: {sum(tokens) / len(own):,.0f}")
        for run in own:
            lengths = history(run, "rollout/turns_mean")
            print(
                f"  seed {run['seed']}: turns {lengths[0]:.2f} at first, {lengths[-1]:.2f} at last"
            )
        if before:
            print("  explained variance by token:", by_token(before))


def client(run: dict[str, Any]) -> MlflowClient:
    summary = json.loads((Path(run["run_dir"]) / "summary.json").read_text())
    return MlflowClient(summary["tracking_uri"])


def history(run: dict[str, Any], key: str) -> list[float]:
    found = client(run).get_metric_history(run["mlflow_run_id"], stored_key(key))
    return [m.value for m in sorted(found, key=lambda m: m.step)]


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
            known = mean(c["explained_variance"][place] for c in columns)
            parts.append(f"{position}: {known:.2f}")
    return ", ".join(parts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
