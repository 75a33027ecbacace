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

from vapo.config.environments import EnvironmentConfig, environment_name
from vapo.config.rewards import RewardModelVerifier
from vapo.config.schema import DataConfig, FitConfig, RewardConfig
from vapo.errors import UserError
from vapo.rewards.text_judge import TextJudge, rewards_by_source, verdict_fields
from vapo.rewards.verifier_output import VerifierOutput
from vapo.rewards.votes import count_votes
from vapo.rewards.worker_pool import WorkerPool
from vapo.system.shown_text import visible
from vapo.types import FinishReason, Rollout, Verdict

FEWEST_WITHOUT_VERDICT = 8
"""A batch of so many responses without one verdict is the verifier's fault, not the responses'."""

EXTRACTING = ("exact", "regex", "math", "math_verify", "reasoning_gym")
"""Verifiers that extract a response's answer, so that answers can vote."""

logger = logging.getLogger(__name__)


class Scorer(AbstractContextManager["Scorer"]):
    """Judges rollouts with the configured verifier; with `data`, each source's with its own.

    A verifier that hangs, crashes, raises or returns NaN costs that response a verdict with
    `failure` set (incorrect, the configured incorrect reward); it ends the run only where a
    batch has no verdict at all, from which nothing could be learnt. Each verifier in use has
    `num_workers` processes.

    Episodes of an `environment` have their rewards from it, and no verifier is asked.

    With `output`, which is for somebody who looks at each verdict, it has what the verifiers
    print, and failures are neither warned of nor counted.

    Raises:
        UserError: a setting is missing or unusable, or a verifier cannot be imported.
    """

    def __init__(
        self,
        rewards: RewardConfig,
        *,
        max_response_tokens: int,
        data: DataConfig | None = None,
        output: VerifierOutput | None = None,
        environment: EnvironmentConfig | None = None,
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
        if environment is not None and environment.is_used:
            self.judges.append(_Judge(rewards, output, environment))
            return
        by_source = {} if data is None else rewards_by_source(rewards, data)
        if all(own is rewards for own in by_source.values()):
            self.judges.append(_Judge(rewards, output))
            return
        try:
            for source, config in by_source.items():
                judge = next((made for made in self.judges if made.config == config), None)
                if judge is None:
                    judge = _Judge(config, output)
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
        return self._judge_of(source).extracts_answers

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
            if not judge.extracts_answers:
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


def scorer_of(config: FitConfig) -> Scorer:
    """The scorer of a run: its verifiers, or its environment's own rewards.

    Raises: UserError as `Scorer`.
    """
    return Scorer(
        config.rewards,
        max_response_tokens=config.rollouts.max_response_tokens,
        data=config.data,
        environment=config.environment,
    )


def episode_verdict(rollout: Rollout, environment: EnvironmentConfig) -> Verdict:
    """What the environment has said of an episode: the sum of its rewards.

    It is correct where the environment ended it with more than `environment.correct_above`.
    """
    reward = sum(turn.reward for turn in rollout.turns)
    has_ended = rollout.failure is None and rollout.finish_reason is FinishReason.STOP
    is_correct = has_ended and reward > environment.correct_above
    return Verdict(is_correct=is_correct, reward=reward, failure=rollout.failure)


class _Judge:
    """One verifier: its worker processes, its reward model, or what an environment has said."""

    def __init__(
        self,
        rewards: RewardConfig,
        output: VerifierOutput | None = None,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        self.config = rewards
        self._environment = environment
        self._texts: TextJudge | None = None
        self._warns = output is None  # else every failure is shown beside its response
        if environment is not None:
            return
        if isinstance(rewards, RewardModelVerifier):
            from vapo.rewards.reward_model import RewardModel

            self._reward_model = RewardModel(rewards.reward_model_path)
            self._threshold = rewards.reward_model_threshold
        else:
            self._texts = TextJudge(rewards, output)

    @property
    def extracts_answers(self) -> bool:
        return self._environment is None and self.config.verifier in EXTRACTING

    @property
    def pool(self) -> WorkerPool | None:
        return None if self._texts is None else self._texts.pool

    def score(self, rollouts: Sequence[Rollout], advance: Callable[[int], None]) -> list[Verdict]:
        if self._environment is not None:
            verdicts = [episode_verdict(rollout, self._environment) for rollout in rollouts]
            advance(len(rollouts))
        else:
            replies = self._replies(rollouts, advance)
            verdicts = [Verdict(**verdict_fields(self.config, reply)) for reply in replies]
        if self._warns:
            self._check_failures(rollouts, verdicts)
        return verdicts

    def _replies(
        self, rollouts: Sequence[Rollout], advance: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        if self._texts is None:
            return self._ask_model(self._reward_model, rollouts, advance)
        tasks = [(r.response_text, r.prompt.answer, r.prompt.metadata) for r in rollouts]
        return self._texts.replies(tasks, advance)

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

    def _check_failures(self, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict]) -> None:
        failed = [i for i, verdict in enumerate(verdicts) if verdict.failure is not None]
        if not failed:
            return
        first = f"{verdicts[failed[0]].failure}, prompt {rollouts[failed[0]].prompt.prompt_id}"
        if len(failed) == len(verdicts) >= FEWEST_WITHOUT_VERDICT:
            name = f"verifier {getattr(self.config, 'function', self.config.verifier)}"
            if self._environment is not None:
                name = f"environment {environment_name(self._environment)}"
            raise UserError(
                f"the {name} gave no verdict on any of {len(verdicts)} responses; "
                f"the first: {first}"
            )
        logger.warning(
            "no verdict for %d of %d responses (%s); the first: %s",
            len(failed),
            len(verdicts),
            "counted as incorrect" if self._environment is None else "they are not trained on",
            visible(first, keep=""),
        )
