"""A reward model as a verifier: responses wait until a batch of them can be scored."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from vapo.rewards.reward_model import RewardModel
from vapo.rewards.worker_pool import OnReply
from vapo.types import Rollout


class ModelJudge:
    """Scores above `threshold` are correct.

    It computes on the trainer's device, so it never runs beside the sampling: what waits is scored
    together, once there is nothing to sample or a whole batch of responses waits.

    Raises: UserError: as `RewardModel`.
    """

    def __init__(self, path: str | None, threshold: float) -> None:
        self._model = RewardModel(path)
        self._threshold = threshold
        self._waiting: dict[int, tuple[Rollout, OnReply]] = {}
        self._num_asked, self._enough = 0, math.inf

    def submit(
        self, rollout: Rollout, on_reply: OnReply, num_responses: int | None
    ) -> Callable[[], None]:
        """Ask for a score; what is returned withdraws the question."""
        number = self._num_asked
        self._num_asked += 1
        self._waiting[number] = rollout, on_reply
        self._enough = math.inf if num_responses is None else num_responses
        return partial(self._withdraw, number)

    def _withdraw(self, number: int) -> None:
        self._waiting.pop(number, None)

    def pump(self, *, is_idle: bool) -> None:
        """Score what waits, if it is enough or there is nothing else to do."""
        if not self._waiting or not (is_idle or len(self._waiting) >= self._enough):
            return
        asked, self._waiting = list(self._waiting.values()), {}
        scores = self._model([rollout for rollout, _ in asked])
        for score, (_, on_reply) in zip(scores, asked, strict=True):
            on_reply(self._reply(score))

    def _reply(self, score: float | str) -> dict[str, Any]:
        if isinstance(score, str):
            return {"failure": score}
        if not math.isfinite(score):
            return {"failure": "nan"}
        return {"is_correct": score > self._threshold, "reward": score}
