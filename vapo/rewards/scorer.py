"""Rollouts -> verdicts with their rewards, whatever the verifier does.

`vapo.rollouts.batch` makes tensors of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from random import Random
from typing import Any

from vapo.config.data_rules import source_name, sources_of
from vapo.config.rewards import (
    PythonVerifier,
    RegexVerifier,
    RewardModelVerifier,
    with_verifier,
)
from vapo.config.schema import DataConfig, MixtureSource, RewardConfig
from vapo.errors import UserError
from vapo.rewards.verifiers import (
    FUNCTION_KEY,
    MAX_RESPONSE_CHARS,
    exact,
    make_reasoning_gym,
    make_regex,
)
from vapo.rewards.votes import count_votes
from vapo.rewards.worker import Settings, Task
from vapo.rewards.worker_pool import WorkerPool
from vapo.system.handed_functions import bytes_of
from vapo.types import Rollout, Verdict

FEWEST_WITHOUT_VERDICT = 8
"""A batch of so many responses without one verdict is the verifier's fault, not the responses'."""

EXTRACTING = ("exact", "regex", "math", "reasoning_gym")
"""Verifiers that extract a response's answer, so that answers can vote."""

logger = logging.getLogger(__name__)


class Scorer(AbstractContextManager["Scorer"]):
    """Judges rollouts with the configured verifier; with `data`, each source's with its own.

    A verifier that hangs, crashes, raises or returns NaN costs that response a verdict with
    `failure` set (incorrect, the configured incorrect reward); it ends the run only where a
    batch has no verdict at all, from which nothing could be learnt. Each verifier in use has
    `num_workers` processes.

    Raises:
        UserError: a setting is missing or unusable, or a verifier cannot be imported.
    """

    def __init__(
        self, rewards: RewardConfig, *, max_response_tokens: int, data: DataConfig | None = None
    ) -> None:
        overlong = rewards.overlong
        ramp_tokens = overlong.ramp_tokens(max_response_tokens)
        if overlong.soft_punishment and ramp_tokens > max_response_tokens:
            raise UserError(
                f"rewards.overlong.cache_tokens is {ramp_tokens}, above "
                f"max_response_tokens, {max_response_tokens}: every response would be punished"
            )
        self.judges: list[_Judge] = []
        self.by_source: dict[str, _Judge] = {}
        by_source = {} if data is None else rewards_by_source(rewards, data)
        if all(own is rewards for own in by_source.values()):
            self.judges.append(_Judge(rewards))
            return
        try:
            for source, config in by_source.items():
                judge = next((made for made in self.judges if made.config == config), None)
                if judge is None:
                    judge = _Judge(config)
                    self.judges.append(judge)
                self.by_source[source] = judge
        except BaseException:
            self.close()
            raise

    def score(
        self,
        rollouts: Sequence[Rollout],
        *,
        advance: Callable[[int], None] = lambda n: None,
        shuffle_seed: int | None = None,
    ) -> list[Verdict]:
        """One verdict per rollout, in their order; `advance(n)` reports n more as done.

        With `shuffle_seed` the verdicts are permuted over the batch, all sources together (the
        negative control `rewards.shuffle`: same rewards, no relation to the responses).
        """
        verdicts: dict[int, Verdict] = {}
        for judge, rows in self._shares(rollouts):
            found = judge.score([rollouts[row] for row in rows], advance)
            verdicts |= zip(rows, found, strict=True)
        ordered = [verdicts[row] for row in range(len(rollouts))]
        if shuffle_seed is not None:
            Random(f"shuffle/{shuffle_seed}").shuffle(ordered)
        return ordered

    def extracts_answers(self, source: str = "") -> bool:
        """Whether this source's verifier extracts a response's answer, so that answers can vote."""
        return self._judge_of(source).config.verifier in EXTRACTING

    def votes(
        self, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict], *, group_size: int
    ) -> list[int | None]:
        """For each response the answer that it votes for: equal in a group for equal answers.

        None for a response without an answer or a verdict, and where the verifier extracts no
        answers. Groups are contiguous. With `math` answers are equal as it compares them with a
        reference, with the others as text.
        """
        votes: list[int | None] = [None] * len(rollouts)
        for judge, rows in self._shares(rollouts):
            if judge.config.verifier not in EXTRACTING:
                continue
            found = count_votes(
                [rollouts[row] for row in rows],
                [verdicts[row] for row in rows],
                group_size=group_size,
                pool=judge.pool if judge.config.verifier == "math" else None,
            )
            for row, vote in zip(rows, found, strict=True):
                votes[row] = vote
        return votes

    def close(self) -> None:
        """End the verifier processes; a second call does nothing."""
        for judge in self.judges:
            if judge.pool is not None:
                judge.pool.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge_of(self, source: str) -> _Judge:
        return self.by_source[source] if self.by_source else self.judges[0]

    def _shares(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[_Judge, list[int]]]:
        """Each verifier with the rows that it judges."""
        for judge in self.judges:
            rows = [i for i, r in enumerate(rollouts) if self._judge_of(r.prompt.source) is judge]
            if rows:
                yield judge, rows


def rewards_by_source(rewards: RewardConfig, data: DataConfig) -> dict[str, RewardConfig]:
    """Map each source's name, the empty one included, to the rewards with its own verifier."""
    found = {}
    for name in ("train", "heldout"):
        for key, source in sources_of(data, name).items():
            own = rewards
            if isinstance(source, MixtureSource) and source.verifier is not None:
                own = with_verifier(rewards, source)
            found[source_name(key)] = own
    return found


class _Judge:
    """One verifier: its worker processes, or its reward model."""

    def __init__(self, rewards: RewardConfig) -> None:
        self.config = rewards
        self.pool: WorkerPool | None = None
        self._reward_model: Callable[..., list[float | str]] | None = None
        if isinstance(rewards, RewardModelVerifier):
            from vapo.rewards.reward_model import RewardModel

            self._reward_model = RewardModel(rewards.reward_model_path)
            self._threshold = rewards.reward_model_threshold
        elif rewards.verifier != "exact":
            self.pool = _start_pool(rewards)

    def score(self, rollouts: Sequence[Rollout], advance: Callable[[int], None]) -> list[Verdict]:
        if self._reward_model is not None:
            replies = self._ask_model(self._reward_model, rollouts, advance)
        elif self.pool is not None:
            replies = self._ask_workers(self.pool, rollouts, advance)
        else:
            replies = [vars(exact(r.response_text, r.prompt.answer, {})) for r in rollouts]
            advance(len(rollouts))
        verdicts = [self._verdict(reply) for reply in replies]
        self._check_failures(rollouts, verdicts)
        return verdicts

    def _ask_workers(
        self, pool: WorkerPool, rollouts: Sequence[Rollout], advance: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        needs_metadata = self.config.verifier in ("python", "reasoning_gym")
        tasks: list[Task] = [
            (
                rollout.response_text[-MAX_RESPONSE_CHARS:],
                rollout.prompt.answer,
                dict(rollout.prompt.metadata) if needs_metadata else {},
            )
            for rollout in rollouts
        ]
        replies: dict[int, dict[str, Any]] = {}

        def on_reply(index: int, reply: dict[str, Any]) -> None:
            replies[index] = reply
            advance(1)

        pool.run(tasks, on_reply)
        return [replies[index] for index in range(len(rollouts))]

    def _ask_model(
        self,
        model: Callable[..., list[float | str]],
        rollouts: Sequence[Rollout],
        advance: Callable[[int], None],
    ) -> list[dict[str, Any]]:
        replies: list[dict[str, Any]] = []
        for score in model(rollouts, advance=advance):
            if isinstance(score, str):
                replies.append({"failure": score})
            elif not math.isfinite(score):
                replies.append({"failure": "nan"})
            else:
                is_correct = score > self._threshold
                replies.append({"is_correct": is_correct, "reward": score})
        return replies

    def _verdict(self, reply: dict[str, Any]) -> Verdict:
        if "failure" in reply:
            return Verdict(False, self.config.incorrect, failure=reply["failure"])
        is_correct = reply["is_correct"]
        reward = reply.get("reward")
        if reward is None:
            reward = self.config.correct if is_correct else self.config.incorrect
        return Verdict(is_correct, reward, extracted=reply.get("extracted"))

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


def _start_pool(rewards: RewardConfig) -> WorkerPool:
    """Check the settings here, where it is cheap; a user's function only in a worker."""
    pattern = rewards.pattern if isinstance(rewards, RegexVerifier) else None
    own = rewards if isinstance(rewards, PythonVerifier) else None
    if pattern is not None:
        make_regex(pattern)
    if rewards.verifier == "reasoning_gym":
        make_reasoning_gym()
    settings = Settings(
        rewards.verifier,
        pattern,
        None if own is None else own.function,
        rewards.timeout_s,
        function_folder=None if own is None else own.function_folder,
        function_bytes=None if own is None else bytes_of(own.function, key=FUNCTION_KEY),
    )
    return WorkerPool(
        settings,
        num_workers=rewards.num_workers,
        wait_until_ready=rewards.verifier not in ("regex", "math", "reasoning_gym"),
    )
