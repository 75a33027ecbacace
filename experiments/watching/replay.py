"""Recorded runs through the watchers: which would be in alarm, how near to it the rest is.

    python experiments/watching/replay.py MLFLOW_DB ... [-- watch.entropy.limit=0.1 ...]

Reads MLflow's SQLite stores, and changes nothing. Runs of fewer than 20 iterations are left out.
"""

from __future__ import annotations

import math
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.diagnostics.watchers import SIGNS, WatcherState
from vapo.tracking.metric_names import stored_names

ROOT = Path(__file__).parents[2]
LEAST_ITERATIONS = 20


def iterations(store: sqlite3.Connection, run_id: str) -> Iterator[tuple[int, dict[str, float]]]:
    """The number of each iteration and the means of its metrics, as the watchers get them."""

    query = "select step, value from metrics where run_uuid = ? and key = ? and not is_nan"
    keys = store.execute("select distinct key from metrics where run_uuid = ?", (run_id,))
    names = [name for (name,) in keys.fetchall()]

    def history(key: str) -> list[tuple[int, float]]:
        return sorted(
            point
            for stored in stored_names(names, key)
            for point in store.execute(query, (run_id, stored)).fetchall()
        )

    metrics = {key: history(key) for sign in SIGNS.values() for key in sign.metrics}
    previous = -math.inf  # value pretraining has steps below 0
    for number, (step, phase) in enumerate(history("progress/phase"), start=1):
        values = {
            key: [value for at, value in points if previous < at <= step]
            for key, points in metrics.items()
        }
        if phase == 0:
            signs = (sign for sign in SIGNS.values() if sign.of_policy_phase)
            values |= {key: [] for sign in signs for key in sign.metrics}
        yield (
            number,
            {key: sum(numbers) / len(numbers) for key, numbers in values.items() if numbers},
        )
        previous = step


def main(stores: list[str], overrides: list[str]) -> None:
    watchers = load_config(FitConfig, [ROOT / "conf/vapo.yaml"], overrides).watch.watchers()
    nearest: dict[str, float] = {}
    longest: dict[str, int] = {}
    num_runs = 0
    for path in stores:
        store = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        for run_id, name in store.execute("select run_uuid, name from runs").fetchall():
            looks = list(iterations(store, run_id))
            if len(looks) < LEAST_ITERATIONS:
                continue
            num_runs += 1
            states = [WatcherState(key, watcher) for key, watcher in watchers.items()]
            alarms: dict[str, str] = {}
            for number, metrics in looks:
                for state in states:
                    if state.check_metrics(number, metrics):
                        alarms[state.name] = state.describe()
            for text in alarms.values():
                print(f"{name} ({run_id}): {text}")
            if alarms:
                continue
            for number, metrics in looks:
                for state in states:
                    if state.check_metrics(number, metrics) is None:
                        continue
                    worst = min if state.sign.is_floor else max
                    figure = nearest.get(state.name, state.figure)
                    nearest[state.name] = worst(figure, state.figure)
                    count = 0 if state.episode is None else state.episode.count
                    longest[state.name] = max(longest.get(state.name, 0), count)
    print(f"{num_runs} runs; those without an alarm came this near:")
    for key, figure in nearest.items():
        print(f"  {key}: {figure:.3g}, limit {watchers[key].limit:g}", end="")
        print(f", beyond it for {longest[key]} iterations" if longest[key] else "")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    main(arguments[:cut], arguments[cut + 1 :])
