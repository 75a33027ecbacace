"""How many samples a system needs for another's signal: a forecast of the map without training.

    python experiments/critics/where_it_pays/surrogate.py
    python experiments/critics/where_it_pays/surrogate.py --steps 6 --group_size 8 --slip_rate 0.1

What is simulated: a response has n steps. A prompt's share of hard steps is uniform from 0 to 1.
Each hard step is of one of 15 kinds, and goes wrong with the slip rate. The reward is +1 if none
has gone wrong, else -1. The policy has one logit for each kind, so that the gradient of a kind is
the sum of (slip - slip rate) A over its steps, with the system's advantage A, whitened over the
batch. The signal is that gradient's mean over batches, the noise its standard deviation. A system
needs (noise / signal)^2 as many samples, and the forecast is that number beside that of the others'
mean reward at lambda 1 in the same cell. The trusted critic is simulated by its first formula,
which leaves the final surprise to lambda.

What is assumed of the critic. The state's true value V* is known here.
V_1 = mean + slope_between (V*_1 - mean) + noise of rest_between, and
V_t - V_1 = slope_within (V*_t - V*_1) + noise of rest_within, nine tenths of which are carried on
from one step to the next. Slopes and rests are those that `measure.py` has found. The trusted
critic has the weights that are best for these rewards, as if they had been fitted to all rollouts.

What is left out: that the kinds share the policy's weights, the noise of all other tokens, the
clip, that a critic goes on learning, and that slips become rare while the policy learns.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).parent
KINDS = 15  # three hard keys in five positions
TOKENS = 4  # of a step
CARRIED = 0.9
CONTROL = "without a critic, lambda 1"
SYSTEMS = ("VAPO", "trusted", "without a critic, lambda by length")


class Critic(NamedTuple):
    """What the values have of the truth, and what else is in them."""

    slope_between: float
    rest_between: float
    slope_within: float
    rest_within: float


class Batches(NamedTuple):
    """Simulated responses [batches, responses, ...] by their steps; `values` has n + 1 of them."""

    hard: np.ndarray
    kinds: np.ndarray
    slipped: np.ndarray
    values: np.ndarray
    rewards: np.ndarray


def simulate(
    rng: np.random.Generator,
    critic: Critic,
    *,
    batches: int,
    responses: int,
    group_size: int,
    steps: int,
    slip_rate: float,
) -> Batches:
    """Draw prompts and their responses, and the critic's values of each of their states."""
    prompts = (batches, responses // group_size, 1)
    share = rng.random((*prompts, 1))
    hard = np.repeat(rng.random((*prompts, steps)) < share, group_size, axis=2)
    kinds = np.repeat(rng.integers(KINDS, size=(*prompts, steps)), group_size, axis=2)
    shape = (batches, responses, steps)
    hard, kinds = hard.reshape(shape), kinds.reshape(shape)
    slipped = hard & (rng.random(hard.shape) < slip_rate)
    off = np.maximum.accumulate(slipped, axis=2)
    rewards = np.where(off[:, :, -1], -1.0, 1.0)
    start = np.zeros((batches, responses, 1))
    remaining = np.concatenate([hard[:, :, ::-1].cumsum(axis=2)[:, :, ::-1], start], axis=2)
    off = np.concatenate([start.astype(bool), off], axis=2)
    truth = np.where(off, -1.0, 2 * (1 - slip_rate) ** remaining - 1)
    first, moved = truth[:, :, :1], truth - truth[:, :, :1]
    mean = first.mean()
    values = mean + critic.slope_between * (first - mean)
    values = values + critic.rest_between * rng.standard_normal(values.shape)
    rest = np.zeros((batches, responses))
    errors = [rest]
    for _ in range(steps):
        fresh = rng.standard_normal(rest.shape) * critic.rest_within
        rest = CARRIED * rest + np.sqrt(1 - CARRIED**2) * fresh
        errors.append(rest)
    values = values + critic.slope_within * moved + np.stack(errors, axis=2)
    return Batches(hard, kinds, slipped, values, rewards)


def others_mean(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """The mean reward of the other responses in a group, or in the batch if groups have size 1."""
    groups = rewards.reshape(len(rewards), -1, rewards.shape[1] if group_size == 1 else group_size)
    other_means = (groups.sum(axis=2, keepdims=True) - groups) / (groups.shape[2] - 1)
    return other_means.reshape(rewards.shape)


def gae(values: np.ndarray, rewards: np.ndarray, lambda_: float) -> np.ndarray:
    """A of the token that decides each step, whose four tokens have one value before it and one
    after. What comes s steps later counts lambda^(4 s), and the end is one step after the last."""
    steps, per_step = values.shape[2] - 1, lambda_**TOKENS
    carried = (rewards - values[:, :, -1]) * per_step
    sums = np.empty((*rewards.shape, steps))
    for step in reversed(range(steps)):
        change = values[:, :, step + 1] - values[:, :, step]
        sums[:, :, step] = change + carried
        carried = per_step * sums[:, :, step]
    return sums


def trust(data: Batches, baseline: np.ndarray) -> tuple[float, float]:
    """The weights in [0, 1] of V_1 and of V_t - V_1 that predict R - B best."""
    rest = data.rewards - baseline
    first = data.values[:, :, 0] - data.values[:, :, 0].mean() - (baseline - baseline.mean())
    moved = data.values[:, :, :-1] - data.values[:, :, :1]
    steps = moved.shape[2]
    columns = [np.repeat(first[:, :, None], steps, axis=2), moved]
    columns = [column - column.mean() for column in columns]
    gram = np.array([[(a * b).mean() for b in columns] for a in columns])
    target = [(column * (rest - rest.mean())[:, :, None]).mean() for column in columns]
    weights = np.linalg.solve(gram + 1e-9 * np.eye(2), target)
    return float(np.clip(weights[0], 0, 1)), float(np.clip(weights[1], 0, 1))


def advantages(data: Batches, system: str, *, group_size: int, alpha: float) -> np.ndarray:
    """The system's advantage at each step, whitened over the batch."""
    steps = data.hard.shape[2]
    by_length = 1 - 1 / (alpha * (TOKENS * steps + 3))
    baseline = others_mean(data.rewards, group_size)
    constant = np.repeat(baseline[:, :, None], steps + 1, axis=2)
    if system == "VAPO":
        estimate = gae(data.values, data.rewards, by_length)
    elif system == "trusted":
        of_first, within = trust(data, baseline)
        first = data.values[:, :, :1]
        initial = constant[:, :, :1]
        mixed = constant + of_first * (first - first.mean() - initial + initial.mean())
        mixed = mixed + within * (data.values - first)
        estimate = gae(mixed, data.rewards, 1 - within * (1 - by_length))
    else:
        estimate = gae(constant, data.rewards, 1.0 if system.endswith("lambda 1") else by_length)
    estimate = estimate - estimate.mean(axis=(1, 2), keepdims=True)
    return estimate / (estimate.std(axis=(1, 2), keepdims=True) + 1e-4)


def responses_needed(
    critic: Critic,
    *,
    steps: int,
    group_size: int,
    slip_rate: float,
    responses: int = 32,
    alpha: float = 0.15,
    batches: int = 4000,
    seed: int = 0,
) -> dict[str, float]:
    """Responses that each system needs in a batch until its signal is as large as its noise."""
    per_part = max(1, 200_000 // (responses * steps))
    systems = (CONTROL, *SYSTEMS)
    rng = np.random.default_rng(seed)
    sums = {system: np.zeros(3) for system in systems}  # of number, gradients, squares
    for _ in range(0, batches, per_part):
        data = simulate(
            rng, critic, batches=per_part, responses=responses, group_size=group_size,
            steps=steps, slip_rate=slip_rate,
        )  # fmt: skip
        for system in systems:
            estimate = advantages(data, system, group_size=group_size, alpha=alpha)
            score = (data.slipped - slip_rate) * data.hard * estimate
            for kind in range(KINDS):
                gradients = (score * (data.kinds == kind)).sum(axis=(1, 2))
                squares = (gradients**2).sum()
                sums[system] += len(gradients), gradients.sum(), squares
    num_responses = {}
    for system, (number, total, squares) in sums.items():
        mean = total / number
        num_responses[system] = round(float(responses * (squares / number - mean**2) / mean**2), 1)
    return num_responses


def forecast(critic: Critic, **cell: Any) -> dict[str, float]:
    """Samples that each system needs, beside those without a critic at lambda 1."""
    return beside(responses_needed(critic, **cell))


def beside(num_responses: Mapping[str, float]) -> dict[str, float]:
    """Each system's number, as a share of the one without a critic at lambda 1."""
    return {system: round(num_responses[system] / num_responses[CONTROL], 3) for system in SYSTEMS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help="forecast one cell, with the mean critic")
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--slip_rate", type=float, default=0.1)
    parser.add_argument("--alpha", type=float, default=0.15)
    options = parser.parse_args()
    measured: list[dict[str, Any]] = json.loads((FOLDER / "measured.json").read_text())
    critics = [Critic(**{name: row[name] for name in Critic._fields}) for row in measured]
    if options.steps is not None:
        mean = Critic(*np.mean(critics, axis=0).tolist())
        num_responses = responses_needed(mean, **vars(options))
        print(
            json.dumps(
                {"responses_needed": num_responses, "samples": beside(num_responses)}, indent=1
            )
        )
        return
    rows = []
    for row, critic in zip(measured, critics, strict=True):
        for group_size, share in itertools.product((1, 2, 4, 8), (1.0, 0.5)):
            cell = {"steps": int(row["steps"]), "group_size": group_size}
            slip_rate = share * row["slip_rate"]
            num_responses = responses_needed(
                critic, slip_rate=slip_rate, alpha=options.alpha, **cell
            )
            needs = {"share_of_slip_rate": share, "responses_needed": num_responses}
            rows.append({**cell, **needs, "samples": beside(num_responses)})
            print(rows[-1], flush=True)
    (FOLDER / "surrogate.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
