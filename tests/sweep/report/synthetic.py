"""A sweep's runs without the sweep: histories made up so that the answers are known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vapo.sweep.grid import GridRow
from vapo.sweep.report.rows import SCORE
from vapo.sweep.report.run_records import RunRecord
from vapo.sweep.report.runs import Collection

ROWS = (
    GridRow("Vanilla PPO", "ppo", "", 5),
    GridRow("GRPO", "grpo", "", 47),
    GridRow("DAPO", "dapo", "", 50),
    *(
        GridRow(f"without {name}", "vapo", name, score)
        for name, score in (
            ("value_pretraining", 11),
            ("decoupled_gae", 33),
            ("length_adaptive_gae", 45),
            ("token_level_loss", 53),
            ("clip_higher", 46),
            ("positive_example_lm_loss", 54),
            ("group_sampling", 55),
        )
    ),
    GridRow("without decoupled_gae, both lambdas 1", "vapo", "decoupled_gae", None),
    GridRow("VAPO", "vapo", "", 60),
)


def run(row: str, seed: int, score: float, *, has_critic: bool = True) -> RunRecord:
    """30 iterations of 4 steps that end at `score`; evaluated at 0 and every 5 iterations."""
    steps = [4 * (i + 1) for i in range(30)]
    wave = {step: math.sin(step / 9 + 2 * seed) for step in steps}

    def towards(step: int, end: float) -> float:
        return 0.3 + (end - 0.3) * (1 - math.exp(-step / 40))

    scores = {
        step: towards(step, score) + 0.01 * wave.get(step, 0.0) for step in range(0, 120, 20)
    } | {120: score}
    return RunRecord(
        f"{row}-{seed}",
        row,
        seed,
        {
            SCORE: scores,
            "rollout/response_length_mean": {s: 80 + 200 * score * s / 120 for s in steps},
            "rollout/reward_mean": {s: 2 * towards(s, score) - 1 + 0.03 * wave[s] for s in steps},
            "actor/entropy": {s: 0.6 - 0.4 * score * s / 120 for s in range(1, 121)},
            "progress/phase": dict.fromkeys(steps, 1.0),
            "progress/policy_steps": {step: float(step) for step in steps},
        }
        | (
            {"critic/explained_variance": dict.fromkeys(steps, 0.4 - 0.3 * score)}
            if has_critic
            else {}
        ),
        positions(score, has_critic),
    )


def positions(score: float, has_critic: bool) -> Sequence[Mapping[str, Any]]:
    places = list(range(0, 300, 5))
    tables = []
    for iteration in (1, 15, 30):
        columns: dict[str, list[float]] = {
            "position": [float(p) for p in places],
            "num_tokens": [256.0 * math.exp(-p / 90) for p in places],
            "advantage_mean": [(0.7 - score) * math.exp(-p / 60) for p in places],
        }
        if has_critic:
            columns["value_mean"] = [score - 0.5 + (1 - score) * p / 300 for p in places]
            columns["reward_weight_mean"] = [(0.95 + 0.04 * score) ** (300 - p) for p in places]
        phase = "policy_optimization"
        tables.append(
            {"iteration": iteration, "phase": phase, "policy_steps": 0, "columns": columns}
        )
    return tables


def pretraining(row: str, seed: int) -> RunRecord:
    steps = [4 * (i + 1) for i in range(12)]
    every = range(1, 49)
    return RunRecord(
        f"{row}-{seed}",
        row,
        seed,
        {
            SCORE: {0: 0.3},
            "progress/phase": dict.fromkeys(steps, 0.0),
            "progress/policy_steps": dict.fromkeys(steps, 0.0),
            "critic/value_loss": {s: 0.11 + 0.06 * math.exp(-s / 6) + 0.004 * seed for s in every},
            "critic/explained_variance": {s: 0.2 - 0.5 * math.exp(-s / 15) for s in steps},
        },
    )


def ablation(seeds: int = 3) -> Collection:
    """Every row with as many seeds; scores near a hundredth of the paper's."""
    runs = []
    for row in ROWS:
        for seed in range(seeds):
            score = (row.paper_score or 40) / 100 + 0.02 * math.sin(7 * seed + len(row.name))
            runs.append(run(row.name, seed, score, has_critic=row.name not in ("GRPO", "DAPO")))
    names = ("value pretraining of VAPO", "value pretraining of without group_sampling")
    first = [pretraining(name, seed) for name in names for seed in range(seeds)]
    return Collection("Sweep ablation", ROWS, runs, "VAPO", first)
