"""Gives rollouts their rewards, by verifiers or by an environment.

`Verdict.on` adds a verdict to its rollout; `vapo.rollouts.batch` makes tensors of the rewards.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, TypeVar

import torch

from vapo.config.environments import environment_name
from vapo.config.rewards import RewardModelVerifier
from vapo.config.schema import FitConfig, RewardConfig
from vapo.environments.contract import Environments, Verdict
from vapo.environments.processes import make_environments
from vapo.errors import UserError
from vapo.errors.shown_text import visible
from vapo.rewards.judged_responses import JudgedResponses, OnVerdict
from vapo.rewards.reward_model import ModelJudge
from vapo.rewards.several_judges import SeveralJudges, one_or_several
from vapo.rewards.text_judge import (
    WAIT_S,
    OnReply,
    TextJudge,
    judged_part,
    rewards_by_source,
    verdict_fields,
)
from vapo.rewards.verifier_output import VerifierOutput
from vapo.rewards.votes import count_votes
from vapo.system.distributed import sum_over_ranks
from vapo.types import Rollout

OneJudge = TextJudge | ModelJudge
Judge = OneJudge | SeveralJudges[OneJudge]
_S = TypeVar("_S")

FEWEST_WITHOUT_VERDICT = 8
"""If no response of a batch has a verdict, and it has at least this many, the run ends: the fault
is the verifier's and not the responses'."""

_WRONG_TYPE = r"error: TypeError: returned (?!None\b)"
"""How a reply begins whose verifier returned something else than a verdict."""

EXTRACTING = ("exact", "regex", "math", "math_verify", "reasoning_gym")
"""Verifiers that extract a response's answer, so that answers can vote."""

FAILURES = ("timeout", "crash", "error", "garbled")
"""The kinds of failure of an environment."""

logger = logging.getLogger(__name__)


class Scorer(ABC):
    """The interface by which a run gets rewards, from verifiers or from an environment."""

    @abstractmethod
    def environments(
        self, *, has_own_processes: bool = False, num_responses: int | None = None
    ) -> AbstractContextManager[Environments]:
        """Open the environments that answer one loop's turns. The returned context closes them.

        Args:
            has_own_processes: whether the loop needs processes of its own, because another loop may
                be open at the same time in a thread that waits for this one.
            num_responses: the number of responses in a batch. A reward model judges once this many
                wait, or once there is nothing to sample.
        """

    @abstractmethod
    def check(self, rollouts: Sequence[Rollout]) -> None:
        """Warn of a batch's responses that have no verdict.

        Raises: UserError: no response of a large enough batch has a verdict.
        """

    @abstractmethod
    def close(self) -> None:
        """End the scorer's processes; a second call does nothing."""

    def failures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return metrics that count the failed episodes of all ranks. Every rank must call this.

        Only an environment has such metrics; with verifiers they are empty.
        """
        return {}

    def extracts_answers(self, source: str = "") -> bool:
        """Whether this data source's verifier extracts answers, so that they can vote."""
        return False

    def votes(self, rollouts: Sequence[Rollout], *, group_size: int) -> list[int | None]:
        """Return a number for each response; equal ones mean equal answers within a group.

        The number is None for a response without an answer or a verdict, and for a verifier that
        extracts no answers. Groups are contiguous. The verifier `math` compares answers
        mathematically; the others compare their texts.
        """
        return [None] * len(rollouts)

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class VerifierScorer(Scorer):
    """Judges responses with the config's verifier, or with the own verifier of a mixture's source.

    If a verifier hangs, crashes, raises or returns NaN, that response alone gets a verdict with
    `failure` set: it is incorrect and gets the configured incorrect reward. The run ends only if a
    batch has no verdict at all, since nothing could be learned from it. Each verifier in use has
    `num_workers` processes.

    Args:
        output: collects what the verifiers print, for a caller that shows each verdict. Failures
            are then neither warned of nor counted.

    Raises: UserError: a setting is missing or unusable, or a verifier cannot be imported.
    """

    def __init__(self, config: FitConfig, output: VerifierOutput | None = None) -> None:
        rewards, max_response_tokens = config.rewards, config.rollouts.max_response_tokens
        overlong = rewards.overlong
        ramp_tokens = overlong.ramp_tokens(max_response_tokens)
        if overlong.soft_punishment and ramp_tokens > max_response_tokens:
            raise UserError(
                f"rewards.overlong.cache_tokens is {ramp_tokens}, above "
                f"max_response_tokens, {max_response_tokens}: every response would be punished"
            )
        self.judges: list[Judge] = []
        self._warns = output is None  # else every failure is shown beside its response
        self._num_timeouts: dict[int, int | None] = {}  # by judge; None: it has answered
        by_source = rewards_by_source(rewards, config.data)
        if all(source_rewards is rewards for source_rewards in by_source.values()):
            by_source = {"": rewards}
        self.by_source: dict[str, Judge] = {}
        try:
            for source, source_rewards in by_source.items():
                equal_judges = [judge for judge in self.judges if judge.config == source_rewards]
                if not equal_judges:
                    equal_judges = [
                        one_or_several(source_rewards, partial(_make_judge, output=output))
                    ]
                    self.judges += equal_judges
                self.by_source[source] = equal_judges[0]
        except BaseException:
            self.close()
            raise

    def environments(
        self, *, has_own_processes: bool = False, num_responses: int | None = None
    ) -> AbstractContextManager[Environments]:
        return closing(JudgedResponses(self, num_responses))

    def submit(
        self, rollout: Rollout, on_verdict: OnVerdict, *, num_responses: int | None = None
    ) -> Callable[[], object]:
        """Queue a rollout for its verifier. `poll` passes the verdict to `on_verdict`.

        Returns: a function that withdraws the rollout.
        """
        judge = self._judge_of(rollout.prompt.source)

        def on_reply(reply: dict[str, Any]) -> None:
            on_verdict(Verdict(**verdict_fields(judge.config, reply)))

        def submit_to(single_judge: OneJudge, on_reply: OnReply) -> Callable[[], object]:
            return self._submit_to(single_judge, rollout, on_reply, num_responses)

        if isinstance(judge, SeveralJudges):
            return judge.submit(submit_to, on_reply)
        return submit_to(judge, on_reply)

    def _submit_to(
        self, judge: OneJudge, rollout: Rollout, on_reply: OnReply, num_responses: int | None
    ) -> Callable[[], object]:
        """Queue a rollout for one judge; return a function that withdraws it.

        If no part of its response is judged (`judged_part`), the reply "incorrect" comes at once.
        """

        def on_checked_reply(reply: dict[str, Any]) -> None:
            self._check_first_replies(judge, reply.get("failure"))
            on_reply(reply)

        judged_rollout = _judged(rollout, judge)
        if judged_rollout is None:
            on_reply({"is_correct": False})
            return lambda: None
        if isinstance(judge, ModelJudge):
            return judge.submit(judged_rollout, on_checked_reply, num_responses)
        prompt = judged_rollout.prompt
        return judge.submit(
            (judged_rollout.response_text, prompt.answer, prompt.columns), on_checked_reply
        )

    def _check_first_replies(self, judge: OneJudge, failure: str | None) -> None:
        """End the run if a verifier's first replies show that it never judges.

        Timeouts are counted until the first verdict, so that a verifier which never returns ends
        the run after its first responses, and not after a whole batch of time limits. A verifier
        that returns a value of a wrong type, for example a dict, ends the run at once. It may
        return None for some responses. Nothing is checked where the caller shows each verdict.

        Raises: UserError: the verifier timed out on as many responses as it may, or returned a
            value of a type that it may not.
        """
        num_timeouts = self._num_timeouts.get(id(judge), 0)
        if num_timeouts is None or not self._warns:
            return
        if failure is not None and re.match(_WRONG_TYPE, failure):
            reason = failure.removeprefix("error: TypeError: ")
            raise UserError(f"the {_described(judge)} {reason} (on its first response)")
        num_timeouts = None if failure is None else num_timeouts + failure.startswith("timeout")
        self._num_timeouts[id(judge)] = num_timeouts
        if num_timeouts == max(FEWEST_WITHOUT_VERDICT, 2 * judge.config.num_workers):
            raise UserError(
                f"the {_described(judge)} timed out on {num_timeouts} responses before it gave a "
                f"verdict, {judge.config.timeout_s:g} s each (rewards.timeout_s): it may never "
                "return; `vapo try` shows a response at a time"
            )

    def poll(self, timeout_s: float) -> None:
        """Pass on verdicts that have come; wait at most `timeout_s` for each judge's first."""
        for judge in self.judges:
            judge.poll(timeout_s)

    def score(
        self, rollouts: Sequence[Rollout], *, advance: Callable[[int], None] = lambda n: None
    ) -> list[Rollout]:
        """Return the rollouts with their verdicts. `advance(1)` is called for each verdict.

        Raises: UserError: a verifier gave no verdict on any response of a large enough batch.
        """
        verdicts: dict[int, Verdict] = {}

        def on_verdict(row: int, verdict: Verdict) -> None:
            verdicts[row] = verdict
            advance(1)

        withdrawals = [
            self.submit(rollout, partial(on_verdict, row)) for row, rollout in enumerate(rollouts)
        ]
        try:
            while len(verdicts) < len(rollouts):
                self.poll(WAIT_S)
        finally:
            for withdraw in withdrawals:
                withdraw()
        judged = [verdicts[row].on(rollout) for row, rollout in enumerate(rollouts)]
        self.check(judged)
        return judged

    def check(self, rollouts: Sequence[Rollout]) -> None:
        for judge, rows in self._rows_by_judge(rollouts) if self._warns else ():
            judged_rollouts = [rollouts[row] for row in rows]
            if not isinstance(judge, SeveralJudges):
                _check(judged_rollouts, _described(judge), "counted as incorrect")
                continue
            for name, single_judge in judge.judges.items():
                with_failure = [
                    replace(r, failure=r.by_verifier[name]["failure"]) for r in judged_rollouts
                ]
                _check(
                    with_failure,
                    f"{_described(single_judge)} ({name})",
                    "counted as incorrect there",
                )

    def extracts_answers(self, source: str = "") -> bool:
        return self._judge_of(source).deciding.config.verifier in EXTRACTING

    def votes(self, rollouts: Sequence[Rollout], *, group_size: int) -> list[int | None]:
        votes: list[int | None] = [None] * len(rollouts)
        for source_judge, rows in self._rows_by_judge(rollouts):
            judge = source_judge.deciding
            if judge.config.verifier not in EXTRACTING:
                continue
            judge_votes = count_votes(
                [_judged(rollouts[row], judge) or rollouts[row] for row in rows],
                group_size=group_size,
                pool=judge.pool if judge.config.verifier == "math" else None,
            )
            for row, vote in zip(rows, judge_votes, strict=True):
                votes[row] = vote
        return votes

    def close(self) -> None:
        for judge in self.judges:
            judge.close()

    def _judge_of(self, source: str) -> Judge:
        return self.by_source[""] if "" in self.by_source else self.by_source[source]

    def _rows_by_judge(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[Judge, list[int]]]:
        """Yield each judge that judges any of the rollouts, with the indices of these rollouts."""
        for judge in self.judges:
            rows = [i for i, r in enumerate(rollouts) if self._judge_of(r.prompt.source) is judge]
            if rows:
                yield judge, rows


class EnvironmentScorer(Scorer):
    """Gets rewards from the config's environment, which it starts at once; no verifier is used.

    Raises: UserError: the environment cannot be imported or loaded.
    """

    def __init__(self, config: FitConfig, output: VerifierOutput | None = None) -> None:
        self._warns = output is None
        self._name = f"environment {environment_name(config.environment)}"
        descriptor = None if output is None else output.descriptor
        self._start = partial(make_environments, config, output=descriptor)
        self._environments = self._start()

    def environments(
        self, *, has_own_processes: bool = False, num_responses: int | None = None
    ) -> AbstractContextManager[Environments]:
        return closing(self._start()) if has_own_processes else nullcontext(self._environments)

    def check(self, rollouts: Sequence[Rollout]) -> None:
        if self._warns:
            _check(rollouts, self._name, "they are not trained on")

    def failures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return metrics that count episodes with a failed environment: all, and each kind."""
        kinds = [str(r.failure).partition(":")[0] for r in rollouts if r.is_lost]
        counts = torch.tensor([len(kinds), *map(kinds.count, FAILURES)])
        names = ("episodes", *FAILURES)
        counts_by_name = zip(names, sum_over_ranks(counts).tolist(), strict=True)
        return {f"rollout/failed_{name}": float(num) for name, num in counts_by_name}

    def close(self) -> None:
        self._environments.close()


def make_scorer(config: FitConfig, output: VerifierOutput | None = None) -> Scorer:
    """Start the scorer of a config: its environment if it has one, else its verifiers.

    Raises: UserError: a setting is missing or unusable, or the environment or a verifier cannot be
        imported.
    """
    kind = EnvironmentScorer if config.environment.is_used else VerifierScorer
    return kind(config, output)


def _make_judge(rewards: RewardConfig, output: VerifierOutput | None) -> OneJudge:
    """Start the judge of a rewards config that has one verifier."""
    is_model = isinstance(rewards, RewardModelVerifier)
    return ModelJudge(rewards) if is_model else TextJudge(rewards, output)


def _judged(rollout: Rollout, judge: OneJudge) -> Rollout | None:
    """Return the rollout with only the judged part of its response, or None if it has none."""
    part = judged_part(judge.config, rollout.response_text, rollout.prompt.text)
    return None if part is None else replace(rollout, response_text=part)


def _described(judge: OneJudge) -> str:
    return f"verifier {getattr(judge.config, 'function', judge.config.verifier)}"


def _check(rollouts: Sequence[Rollout], judge_name: str, effect: str) -> None:
    """Warn of the rollouts with a failure. `effect` ends the warning: it says what becomes of them.

    Raises: UserError: all of them failed, and there are at least `FEWEST_WITHOUT_VERDICT`.
    """
    failed = [r for r in rollouts if r.failure is not None]
    if not failed:
        return
    first = f"{failed[0].failure}, prompt {failed[0].prompt.prompt_id}"
    if len(failed) == len(rollouts) >= FEWEST_WITHOUT_VERDICT:
        raise UserError(
            f"the {judge_name} gave no verdict on any of {len(rollouts)} responses; the first: "
            f"{visible(first, keep='')}"
        )
    logger.warning(
        "no verdict for %d of %d responses (%s); the first: %s",
        len(failed),
        len(rollouts),
        effect,
        visible(first, keep=""),
    )


def with_shuffled_verdicts(rollouts: Sequence[Rollout], seed: int) -> list[Rollout]:
    """Return the rollouts with their verdicts shuffled among all of them.

    This is the negative control `rewards.shuffle`: rewards without a relation to the responses.
    """
    verdicts = [
        Verdict(bool(r.is_correct), r.reward, r.extracted, r.failure, r.by_verifier)
        for r in rollouts
    ]
    Random(f"shuffle/{seed}").shuffle(verdicts)
    return [verdict.on(rollout) for verdict, rollout in zip(verdicts, rollouts, strict=True)]
