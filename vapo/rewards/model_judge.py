"""A reward model as a verifier: responses wait until a batch of them can be scored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from vapo.config.schema import RewardConfig
from vapo.rewards.reward_model import RewardModel
from vapo.rewards.worker_pool import OnReply
from vapo.types import Rollout


class ModelJudge:
    """Scores above `threshold` are correct.

    It computes on the trainer's device, so it never runs beside the sampling: what waits is scored
    together, once there is nothing to sample or a whole batch of responses waits.

    Raises: UserError: as `RewardModel`.
    """

    def __init__(self, rewards: RewardConfig, path: str | None, threshold: float) -> None:
        self.config, self.pool = rewards, None
        self._model = RewardModel(path)
        self._threshold = threshold
        self._waiting: dict[int, tuple[Rollout, OnReply]] = {}
        self._numbers, self._enough = itertools.count(), math.inf

    def submit(
        self, rollout: Rollout, on_reply: OnReply, num_responses: int | None
    ) -> Callable[[], object]:
        """Ask for a score, which `pump` hands out.

        Returns: what withdraws the question.
        """
        number = next(self._numbers)
        self._waiting[number] = rollout, on_reply
        self._enough = math.inf if num_responses is None else num_responses
        return partial(self._waiting.pop, number, None)

    def pump(self, timeout_s: float) -> None:
        """Score what waits, if it is enough or there is nothing else to do."""
        if not self._waiting or not (timeout_s > 0 or len(self._waiting) >= self._enough):
            return
        asked = list(self._waiting.values())
        self._waiting.clear()
        scores = self._model([rollout for rollout, _ in asked])
        for score, (_, on_reply) in zip(scores, asked, strict=True):
            on_reply(self._reply(score))

    def _reply(self, score: float | str) -> dict[str, Any]:
        if isinstance(score, str):
            return {"failure": score}
        if not math.isfinite(score):
            return {"failure": "nan"}
        return {"is_correct": score > self._threshold, "reward": score}

    def close(self) -> None: ...
