"""The small grid of settings that each row of a comparison is tried with, and the best of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vapo.sweep.grid import Grid, GridRow
from vapo.sweep.plan import Plan

LEARNING_RATES = (1.0e-4, 2.0e-4, 4.0e-4)
ALPHAS = (0.25, 0.5, 1.0)
LR, ALPHA = "actor.optimizer.lr", "components.length_adaptive_gae.alpha"
FRESH_BATCHES = 8


def tuned(grid: Grid, plan: Plan) -> Grid:
    """The grid with a row for each setting of each row, named `ROW | lr 0.0001, alpha 0.5`."""
    rows = []
    for row in grid.rows:
        by_length = plan.row_configs[row.name].components.length_adaptive_gae.enabled
        for lr in LEARNING_RATES:
            for alpha in ALPHAS if by_length else (None,):
                settings = {LR: lr} | ({} if alpha is None else {ALPHA: alpha})
                rows.append(replace(with_settings(row, settings), name=_named(row.name, settings)))
    return replace(grid, name=f"{grid.name}_tuning", full_system=None, rows=tuple(rows))


def with_settings(row: GridRow, settings: Mapping[str, Any]) -> GridRow:
    overrides = tuple(f"{key}={json.dumps(value)}" for key, value in settings.items())
    return replace(row, overrides=(*row.overrides, *overrides))


def _named(name: str, settings: Mapping[str, Any]) -> str:
    return f"{name} | " + ", ".join(f"{k.rpartition('.')[2]} {v}" for k, v in settings.items())


def best_settings(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The settings of each tuned row with the best mean accuracy on fresh prompts.

    The last batches of all seeds count; settings that lack a seed that others have do not.
    """
    of_row: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        name, _, settings = row["system"].partition(" | ")
        score = sum(row["accuracy"][-FRESH_BATCHES:]) / len(row["accuracy"][-FRESH_BATCHES:])
        of_row.setdefault(name, {}).setdefault(settings, {})[row["seed"]] = score
    keys = {key.rpartition(".")[2]: key for key in (LR, ALPHA)}
    best_by_row = {}
    for name, scores_by_settings in of_row.items():
        max_seeds = max(map(len, scores_by_settings.values()))
        whole = {
            text: scores for text, scores in scores_by_settings.items() if len(scores) == max_seeds
        }
        best = max(whole, key=lambda text: sum(whole[text].values()))
        pairs = (part.split(" ") for part in best.split(", "))
        best_by_row[name] = {keys[key]: float(value) for key, value in pairs}
    return best_by_row
