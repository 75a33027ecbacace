"""One run as a report needs it: its metrics, and what its policies made of single prompts."""

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
    "critic/explained_variance": "explained variance",
    "actor/clip_fraction_high": "upper clip fraction",
}
"""What is drawn against the policy's steps, and its title."""
RECENT, FRESH, AVERAGE = "eval/recent_avg_at_k", "fresh/accuracy", "average_policy/avg_at_k"
KIND_OF_SCORE = {SCORE: "evaluation", AVERAGE: "average"}
"""Of a score the kind of line in `prompt_scores.jsonl` that it is the mean of."""
_ROUNDING = 1e-6
SCORES = (SCORE, FRESH, RECENT, AVERAGE)
HISTORIES = (
    *SCORES[1:],
    *PANELS,
    *("critic/value_loss", "progress/phase", "progress/policy_steps"),
)


@dataclass(frozen=True)
class RunRecord:
    """One run.

    `history`: metric -> step -> value; `positions`: the position diagnostics; `heldout`:
    names the prompts that it was scored on, None where it recorded none. `scores` has those of
    single prompts; it is empty for runs that recorded none.
    """

    run_id: str
    row: str
    seed: int
    history: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    positions: Sequence[Mapping[str, Any]] = ()
    heldout: str | None = None
    scores: PromptHistory = field(default_factory=PromptHistory)

    def score(self, within: int | None = None, key: str = SCORE) -> float | None:
        """A metric, avg@k, at the last evaluation, or at the last within so many policy steps."""
        steps = self.history.get("progress/policy_steps", {})
        scores = self.history.get(key, {})
        known = [at for at in scores if within is None or steps.get(at, 0) <= within]
        return scores[max(known)] if known else None

    def prompt_means(self, key: str, within: int | None = None) -> Mapping[str, float]:
        """What the policies of a score made of each prompt; nothing where that is not recorded, or
        its mean is not the score."""
        means: Mapping[str, float] = {}
        if key == FRESH and within is None:
            fresh = self.scores.fresh()
            names = (f"{place} {score.prompt}" for place, score in enumerate(fresh.scores))
            means = dict(zip(names, fresh.means, strict=True))
        elif key == RECENT:
            means = self.scores.recent(within)[0]
        elif key in KIND_OF_SCORE:
            found = self.scores.evaluated(KIND_OF_SCORE[key], within)
            means = {} if found is None else found.means
        score = self.score(within, key)
        is_it = bool(means) and score is not None and abs(fmean(means.values()) - score) < _ROUNDING
        return means if is_it else {}
