"""What the surrogate needs to know of each size: the policy's slips, and what its critic knows.

    python experiments/critics/where_it_pays/measure.py

Of each seed's critic that `run.py` trained: its values of 512 responses of the first policy, in
groups of 8, and the mean over the seeds. What a state is worth is known here: the reward is +1 as
long as no step has gone wrong, and each hard step that is left goes wrong with a probability that
is counted. A regression says what share of that the values have, between responses and within
them, and what else is in them.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Callback

FOLDER = Path(__file__).parent
TOKENS = 4  # of a step: label, key, position, check


class Traced(NamedTuple):
    """One response by its steps; an entry for each step, and of `values` one more at the end."""

    hard: np.ndarray
    slipped: np.ndarray
    missed: np.ndarray
    on: np.ndarray
    values: np.ndarray
    reward: float


class Dump(Callback):
    """Keeps the first batch of a run as its responses' texts, values and rewards."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, list[float], float]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        from vapo.training.datamodule import iteration_of

        batch = iteration_of(trainer).batch
        for index, rollout in enumerate(batch.rollouts):
            values = batch.values[index][batch.response_mask[index]].tolist()
            row = (rollout.prompt.text, rollout.response_text, values, float(batch.rewards[index]))
            self.rows.append(row)


def trace(problem: str, response: str, values: list[float], reward: float) -> Traced | None:
    """The steps of a response; None where it is not of the form that the task asks for."""
    from vapo.tasks.checked_steps import HARD_KEYS, moves

    match = re.search(r"([1-5])((?:[a-z][A-H])+)=", problem)
    if match is None or not re.fullmatch(r"(?:[a-z][A-H][1-5][+-])+;[1-5]", response):
        return None
    keys = re.findall("[a-z](.)", match[2])
    steps = re.findall(r"[a-z]([A-H])([1-5])([+-])", response)
    if len(steps) != len(keys):
        return None
    position = right = match[1]
    columns: list[tuple[bool, bool, bool, bool]] = []
    for key, (letter, to, check) in zip(keys, steps, strict=True):
        slipped = to != moves()[letter, position] or letter != key
        right = moves()[key, right]
        position = to
        columns.append((key in HARD_KEYS, slipped, check == "+", position == right))
    hard, slipped, plus, on = (np.array(column) for column in zip(*columns, strict=True))
    before_steps = np.array(values[: TOKENS * len(keys) + 1 : TOKENS])
    return Traced(hard, slipped, plus & ~on, on, before_steps, reward)


def summary(rows: list[Traced]) -> dict[str, Any]:
    """The numbers that the surrogate reads."""
    hard = np.stack([row.hard for row in rows])
    slipped = np.stack([row.slipped for row in rows])
    on = np.stack([row.on for row in rows])
    missed = np.stack([row.missed for row in rows])
    values = np.stack([row.values for row in rows])
    rewards = np.array([row.reward for row in rows])
    was_on = np.concatenate([np.ones((len(rows), 1), bool), on[:, :-1]], axis=1)
    rate = slipped[hard & was_on].mean()
    left = np.concatenate([hard[:, ::-1].cumsum(axis=1)[:, ::-1], np.zeros((len(rows), 1))], axis=1)
    is_on = np.concatenate([np.ones((len(rows), 1), bool), on], axis=1)
    truth = np.where(is_on, 2 * (1 - rate) ** left - 1, -1.0)
    first, of_first = values[:, 0], truth[:, 0]
    between = np.polyfit(of_first, first, 1)
    moved, of_moved = values - first[:, None], truth - of_first[:, None]
    within = (moved * of_moved).sum() / (of_moved**2).sum()
    rest = moved - within * of_moved
    returns = np.repeat(rewards[:, None], values.shape[1], axis=1)
    return {
        "responses": len(rows),
        "steps": hard.shape[1],
        "accuracy": float((rewards > 0).mean()),
        "slip_rate": float(rate),
        "easy_slip_rate": float(slipped[~hard & was_on].mean()),
        "missed_share": float(missed.sum() / (~on).sum()),
        "recovered_share": float(on[:, -1][(slipped.sum(axis=1) > 0)].mean()),
        "explained_variance": float(1 - (returns - values).var() / returns.var()),
        "oracle_explains": float(1 - (returns - truth).var() / returns.var()),
        "level": float(values.mean() - returns.mean()),
        "slope_between": float(between[0]),
        "rest_between": float((first - np.polyval(between, of_first)).std()),
        "slope_within": float(within),
        "rest_within": float(rest[:, 1:].std()),
    }


def measure(size: int, seed: int) -> dict[str, Any]:
    from run import VAPO, Cell, system_settings, task

    import vapo

    files, settings = system_settings(Cell(size, 8, VAPO, seed))
    settings |= task(size) | {
        "seed": 2_000_000 + seed,
        "components.group_sampling.num_prompts": 64,
        "components.group_sampling.group_size": 8,
        "training.num_iterations": 1,
    }
    dump = Dump()
    config = vapo.load_config(FOLDER / "task.yaml", *files, overrides=settings)
    vapo.fit(config, callbacks=[dump], quiet=True)
    traced = [
        trajectory for trajectory in (trace(*row) for row in dump.rows) if trajectory is not None
    ]
    return {"of_the_form": len(traced) / len(dump.rows)} | summary(traced)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="6,12,24,48")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--output", type=Path, default=FOLDER / "measured.json")
    options = parser.parse_args()
    rows = []
    for size in options.sizes.split(","):
        of_seeds = [measure(int(size), int(seed)) for seed in options.seeds.split(",")]
        means = {key: float(np.mean([row[key] for row in of_seeds])) for key in of_seeds[0]}
        rows.append({key: round(mean, 4) for key, mean in means.items()})
        print(json.dumps(rows[-1], indent=1), flush=True)
    options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
