"""A run as a report needs it: its metrics, and its scores of single prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from vapo.sweep.report.rows import SCORE
from vapo.tracking.prompt_scores import PromptHistory

PANELS = {
    SCORE: "score (avg@k), %",
    "rollout/response_length_mean": "response length, tokens",
    "rollout/reward_mean": "mean reward",
    "actor/entropy": "entropy, nats",
    "critic/explained_variance": "explained variance\nof each batch",
    "actor/clip_fraction_high": "upper clip fraction",
}
"""Metric that is drawn against policy steps -> its title."""
RECENT, FRESH, AVERAGE = "eval/recent_avg_at_k", "fresh/accuracy", "average_policy/avg_at_k"
KIND_OF_SCORE = {SCORE: "evaluation", AVERAGE: "average"}
"""Score -> the kind of line in `prompt_scores.jsonl` that has this score for each prompt."""
_ROUNDING = 1e-6
SCORES = (SCORE, FRESH, RECENT, AVERAGE)
HISTORIES = (
    *SCORES[1:],
    *PANELS,
    *("critic/value_loss", "progress/phase", "progress/policy_steps"),
)


@dataclass(frozen=True)
class RunRecord:
    """A run with its recorded metrics.

    Attributes:
        row, seed: its place in the table.
        history: metric -> step -> value.
        positions: the tables of the diagnostics by token position.
        heldout: identifies the prompts on which the run was scored; None if they were not recorded.
        scores: the scores of single prompts, if the run recorded any.
    """

    run_id: str
    row: str
    seed: int
    history: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    positions: Sequence[Mapping[str, Any]] = ()
    heldout: str | None = None
    scores: PromptHistory = field(default_factory=PromptHistory)

    def score(self, within: int | None = None, key: str = SCORE) -> float | None:
        """Return the run's score `key` at its last evaluation; None if there is no evaluation.

        Args:
            within: only evaluations after at most this many policy steps count.
        """
        steps = self.history.get("progress/policy_steps", {})
        scores = self.history.get(key, {})
        steps_with_score = [
            step for step in scores if within is None or steps.get(step, 0) <= within
        ]
        return scores[max(steps_with_score)] if steps_with_score else None

    def prompt_means(self, key: str, within: int | None = None) -> Mapping[str, float]:
        """Return prompt -> the share of correct responses to it, whose mean is the score `key`.

        The result is empty if the run did not record the shares, or if their mean is not the score.

        Args:
            within: only evaluations after at most this many policy steps count.
        """
        means: Mapping[str, float] = {}
        if key == FRESH and within is None:
            fresh = self.scores.fresh()
            names = (f"{place} {score.prompt}" for place, score in enumerate(fresh.scores))
            means = dict(zip(names, fresh.means, strict=True))
        elif key == RECENT:
            means = self.scores.recent(within)[0]
        elif key in KIND_OF_SCORE:
            evaluation = self.scores.evaluated(KIND_OF_SCORE[key], within)
            means = {} if evaluation is None else evaluation.means
        score = self.score(within, key)
        matches_score = (
            bool(means) and score is not None and abs(fmean(means.values()) - score) < _ROUNDING
        )
        return means if matches_score else {}
