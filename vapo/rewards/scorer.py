"""Rollouts -> verdicts with their rewards, whatever the verifier does.

`vapo.rollouts.batch` makes tensors of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from random import Random
from types import TracebackType
from typing import Any

from vapo.config.rewards import PythonVerifier, RegexVerifier, RewardModelVerifier
from vapo.config.schema import RewardConfig
from vapo.errors import UserError
from vapo.rewards.verifiers import MAX_RESPONSE_CHARS, exact, make_reasoning_gym, make_regex
from vapo.rewards.votes import count_votes
from vapo.rewards.worker import Settings, Task
from vapo.rewards.worker_pool import WorkerPool
from vapo.types import Rollout, Verdict

FEWEST_WITHOUT_VERDICT = 8
"""A batch of so many responses without one verdict is the verifier's fault, not the responses'."""

logger = logging.getLogger(__name__)


class Scorer:
    """Judges rollouts with the configured verifier.

    A verifier that hangs, crashes, raises or returns NaN costs that response a verdict with
    `failure` set (incorrect, the configured incorrect reward); it ends the run only where a
    batch has no verdict at all, from which nothing could be learnt.

    Raises:
        UserError: a setting is missing or unusable, or the verifier cannot be imported.
    """

    def __init__(self, rewards: RewardConfig, *, max_response_tokens: int) -> None:
        self.config = rewards
        self._pool: WorkerPool | None = None
        self._reward_model: Callable[..., list[float | str]] | None = None
        overlong = rewards.overlong
        ramp_tokens = overlong.ramp_tokens(max_response_tokens)
        if overlong.soft_punishment and ramp_tokens > max_response_tokens:
            raise UserError(
                f"rewards.overlong.cache_tokens is {ramp_tokens}, above "
                f"max_response_tokens, {max_response_tokens}: every response would be punished"
            )
        if isinstance(rewards, RewardModelVerifier):
            from vapo.rewards.reward_model import RewardModel

            self._reward_model = RewardModel(rewards.reward_model_path)
            self._threshold = rewards.reward_model_threshold
        elif rewards.verifier != "exact":
            self._pool = _start_pool(rewards)

    def score(
        self,
        rollouts: Sequence[Rollout],
        *,
        advance: Callable[[int], None] = lambda n: None,
        shuffle_seed: int | None = None,
    ) -> list[Verdict]:
        """One verdict per rollout, in their order; `advance(n)` reports n more as done.

        With `shuffle_seed` the verdicts are permuted over the batch (the negative control
        `rewards.shuffle`: same rewards, no relation to the responses).
        """
        if self._reward_model is not None:
            verdicts = self._score_by_model(rollouts, advance)
        elif self._pool is not None:
            verdicts = self._score_by_workers(self._pool, rollouts, advance)
        else:
            verdicts = [self._exact(rollout) for rollout in rollouts]
            advance(len(rollouts))
        self._check_failures(rollouts, verdicts)
        if shuffle_seed is not None:
            Random(f"shuffle/{shuffle_seed}").shuffle(verdicts)
        return verdicts

    def extracts_answers(self, source: str = "") -> bool:
        """Whether this verifier extracts a response's answer, so that answers can vote."""
        return self.config.verifier in ("exact", "regex", "math", "reasoning_gym")

    def votes(
        self, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict], *, group_size: int
    ) -> list[int | None]:
        """For each response the answer that it votes for: equal in a group for equal answers.

        None for a response without an answer or a verdict. Groups are contiguous. With `math`
        answers are equal as it compares them with a reference, with the others as text.
        """
        pool = self._pool if self.config.verifier == "math" else None
        return count_votes(rollouts, verdicts, group_size=group_size, pool=pool)

    def close(self) -> None:
        """Ends the verifier processes; a second call does nothing."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _exact(self, rollout: Rollout) -> Verdict:
        judgement = exact(rollout.response_text, rollout.prompt.answer, {})
        return self._verdict({"is_correct": judgement.is_correct, "extracted": judgement.extracted})

    def _score_by_workers(
        self, pool: WorkerPool, rollouts: Sequence[Rollout], advance: Callable[[int], None]
    ) -> list[Verdict]:
        needs_metadata = self.config.verifier in ("python", "reasoning_gym")
        tasks: list[Task] = [
            (
                rollout.response_text[-MAX_RESPONSE_CHARS:],
                rollout.prompt.answer,
                dict(rollout.prompt.metadata) if needs_metadata else {},
            )
            for rollout in rollouts
        ]
        verdicts: dict[int, Verdict] = {}

        def on_reply(index: int, reply: dict[str, Any]) -> None:
            verdicts[index] = self._verdict(reply)
            advance(1)

        pool.run(tasks, on_reply)
        return [verdicts[index] for index in range(len(rollouts))]

    def _score_by_model(
        self, rollouts: Sequence[Rollout], advance: Callable[[int], None]
    ) -> list[Verdict]:
        assert self._reward_model is not None
        scores = self._reward_model(rollouts, advance=advance)
        replies: list[dict[str, Any]] = []
        for score in scores:
            if isinstance(score, str):
                replies.append({"failure": score})
            elif not math.isfinite(score):
                replies.append({"failure": "nan"})
            else:
                replies.append({"is_correct": score > self._threshold, "reward": score})
        return [self._verdict(reply) for reply in replies]

    def _check_failures(self, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict]) -> None:
        failed = [i for i, verdict in enumerate(verdicts) if verdict.failure is not None]
        if not failed:
            return
        first = f"{verdicts[failed[0]].failure}, prompt {rollouts[failed[0]].prompt.prompt_id}"
        if len(failed) == len(verdicts) >= FEWEST_WITHOUT_VERDICT:
            name = getattr(self.config, "function", self.config.verifier)
            raise UserError(
                f"the verifier {name} gave no verdict on any of {len(verdicts)} responses; "
                f"the first: {first}"
            )
        logger.warning(
            "no verdict for %d of %d responses (counted as incorrect); the first: %s",
            len(failed),
            len(verdicts),
            first,
        )

    def _verdict(self, reply: dict[str, Any]) -> Verdict:
        if "failure" in reply:
            return Verdict(False, self.config.incorrect, failure=reply["failure"])
        is_correct = reply["is_correct"]
        reward = reply.get("reward")
        if reward is None:
            reward = self.config.correct if is_correct else self.config.incorrect
        return Verdict(is_correct, reward, extracted=reply.get("extracted"))


def _start_pool(rewards: RewardConfig) -> WorkerPool:
    """Checks the settings here, where it is cheap; a user's function only in a worker."""
    pattern = rewards.pattern if isinstance(rewards, RegexVerifier) else None
    function = rewards.function if isinstance(rewards, PythonVerifier) else None
    if pattern is not None:
        make_regex(pattern)
    if rewards.verifier == "reasoning_gym":
        make_reasoning_gym()
    settings = Settings(rewards.verifier, pattern, function, rewards.timeout_s)
    return WorkerPool(
        settings,
        num_workers=rewards.num_workers,
        wait_until_ready=rewards.verifier not in ("regex", "math", "reasoning_gym"),
    )
