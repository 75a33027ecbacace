"""Where the rewards of rollouts come from: verifiers, or an environment.

`Verdict.on` puts a verdict on its rollout, `vapo.rollouts.batch` makes tensors of the rewards.
"""

from __future__ import annotations

import logging
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
from vapo.system.shown_text import visible
from vapo.types import Rollout

OneJudge = TextJudge | ModelJudge
Judge = OneJudge | SeveralJudges[OneJudge]
_S = TypeVar("_S")

FEWEST_WITHOUT_VERDICT = 8
"""A batch of so many responses without one verdict is the verifier's fault, not the responses'."""

EXTRACTING = ("exact", "regex", "math", "math_verify", "reasoning_gym")
"""Verifiers that extract a response's answer, so that answers can vote."""

FAILURES = ("timeout", "crash", "error", "garbled")
"""Of environments."""

logger = logging.getLogger(__name__)


class Scorer(ABC):
    """What a run's player, evaluation and metrics need of verifiers or of an environment."""

    @abstractmethod
    def environments(
        self, *, own: bool = False, num_responses: int | None = None
    ) -> AbstractContextManager[Environments]:
        """What answers the turns of a loop.

        Args:
            own: another loop may be open at the same time, in a thread that waits for this one.
            num_responses: of a batch; a reward model judges so many together at the latest, else
                when there is nothing to sample.
        """

    @abstractmethod
    def check(self, rollouts: Sequence[Rollout]) -> None:
        """Warn of responses of a batch that were not answered.

        Raises: UserError: none was, which is not the responses' fault.
        """

    @abstractmethod
    def close(self) -> None:
        """End the processes; a second call does nothing."""

    def failures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Metrics of the rollouts of all ranks that are lost; a verifier loses none. Every rank
        must call this."""
        return {}

    def extracts_answers(self, source: str = "") -> bool:
        """Whether this source's verifier extracts a response's answer, so that answers can vote."""
        return False

    def votes(self, rollouts: Sequence[Rollout], *, group_size: int) -> list[int | None]:
        """For each response the answer that it votes for: equal in a group for equal answers.

        None for a response without an answer or a verdict, and where the verifier extracts no
        answers. Groups are contiguous. With `math` answers are equal as it compares them with a
        reference, with the others as text.
        """
        return [None] * len(rollouts)

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class VerifierScorer(Scorer):
    """The config's verifier, which judges a response. Each source of a mixture has one of its own.

    A verifier that hangs, crashes, raises or returns NaN costs that response a verdict with
    `failure` set (incorrect, the configured incorrect reward); it ends the run only where a
    batch has no verdict at all, from which nothing could be learnt. Each verifier in use has
    `num_workers` processes.

    With `output`, which is for somebody who looks at each verdict, it has what the verifiers
    print, and failures are neither warned of nor counted.

    Raises: UserError: a setting is missing or unusable, a verifier cannot be imported.
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
        if all(own is rewards for own in by_source.values()):
            by_source = {"": rewards}
        self.by_source: dict[str, Judge] = {}
        try:
            for source, own in by_source.items():
                same = [judge for judge in self.judges if judge.config == own]
                if not same:
                    same = [one_or_several(own, partial(_make_judge, output=output))]
                    self.judges += same
                self.by_source[source] = same[0]
        except BaseException:
            self.close()
            raise

    def environments(
        self, *, own: bool = False, num_responses: int | None = None
    ) -> AbstractContextManager[Environments]:
        return closing(JudgedResponses(self, num_responses))

    def submit(
        self, rollout: Rollout, on_verdict: OnVerdict, *, num_responses: int | None = None
    ) -> Callable[[], object]:
        """Ask for a verdict, which `pump` hands out; what is returned withdraws the question."""
        judge = self._judge_of(rollout.prompt.source)

        def on_reply(reply: dict[str, Any]) -> None:
            on_verdict(Verdict(**verdict_fields(judge.config, reply)))

        def ask(one: OneJudge, on_reply: OnReply) -> Callable[[], object]:
            return self._ask(one, rollout, on_reply, num_responses)

        if isinstance(judge, SeveralJudges):
            return judge.submit(ask, on_reply)
        return ask(judge, on_reply)

    def _ask(
        self, judge: OneJudge, rollout: Rollout, on_reply: OnReply, num_responses: int | None
    ) -> Callable[[], object]:
        """Ask one verifier; what is returned withdraws the question."""

        def checked(reply: dict[str, Any]) -> None:
            self._check_for_timeouts(judge, reply.get("failure"))
            on_reply(reply)

        judged = _judged(rollout, judge)
        if judged is None:
            on_reply({"is_correct": False})
            return lambda: None
        if isinstance(judge, ModelJudge):
            return judge.submit(judged, checked, num_responses)
        prompt = judged.prompt
        return judge.submit((judged.response_text, prompt.answer, prompt.columns), checked)

    def _check_for_timeouts(self, judge: OneJudge, failure: str | None) -> None:
        """A verifier that never returns is found after its first responses, and not after a batch
        of them, each of which takes its time limit.

        Raises: UserError: it has given no verdict yet, and the last of these timed out.
        """
        num = self._num_timeouts.get(id(judge), 0)
        if num is None or not self._warns:
            return
        num = None if failure is None else num + failure.startswith("timeout")
        self._num_timeouts[id(judge)] = num
        if num == max(FEWEST_WITHOUT_VERDICT, 2 * judge.config.num_workers):
            raise UserError(
                f"the {_shown(judge)} timed out on {num} responses before it gave a verdict, "
                f"{judge.config.timeout_s:g} s each (rewards.timeout_s): it may never return; "
                "`vapo try` shows a response at a time"
            )

    def pump(self, timeout_s: float) -> None:
        """Hand out the verdicts that have come; waits at most so long for the first."""
        for judge in self.judges:
            judge.pump(timeout_s)

    def score(
        self, rollouts: Sequence[Rollout], *, advance: Callable[[int], None] = lambda n: None
    ) -> list[Rollout]:
        """The rollouts with their verdicts; `advance(n)` reports n more as done."""
        found: dict[int, Verdict] = {}

        def on_verdict(row: int, verdict: Verdict) -> None:
            found[row] = verdict
            advance(1)

        withdrawals = [
            self.submit(rollout, partial(on_verdict, row)) for row, rollout in enumerate(rollouts)
        ]
        try:
            while len(found) < len(rollouts):
                self.pump(WAIT_S)
        finally:
            for withdraw in withdrawals:
                withdraw()
        judged = [found[row].on(rollout) for row, rollout in enumerate(rollouts)]
        self.check(judged)
        return judged

    def check(self, rollouts: Sequence[Rollout]) -> None:
        for judge, rows in self._shares(rollouts) if self._warns else ():
            of_judge = [rollouts[row] for row in rows]
            if not isinstance(judge, SeveralJudges):
                _check(of_judge, _shown(judge), "counted as incorrect")
                continue
            for name, one in judge.judges.items():
                with_failure = [
                    replace(r, failure=r.by_verifier[name]["failure"]) for r in of_judge
                ]
                _check(with_failure, f"{_shown(one)} ({name})", "counted as incorrect there")

    def extracts_answers(self, source: str = "") -> bool:
        return self._judge_of(source).deciding.config.verifier in EXTRACTING

    def votes(self, rollouts: Sequence[Rollout], *, group_size: int) -> list[int | None]:
        votes: list[int | None] = [None] * len(rollouts)
        for shared, rows in self._shares(rollouts):
            judge = shared.deciding
            if judge.config.verifier not in EXTRACTING:
                continue
            found = count_votes(
                [_judged(rollouts[row], judge) or rollouts[row] for row in rows],
                group_size=group_size,
                pool=judge.pool if judge.config.verifier == "math" else None,
            )
            for row, vote in zip(rows, found, strict=True):
                votes[row] = vote
        return votes

    def close(self) -> None:
        for judge in self.judges:
            judge.close()

    def _judge_of(self, source: str) -> Judge:
        return self.by_source[""] if "" in self.by_source else self.by_source[source]

    def _shares(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[Judge, list[int]]]:
        """Each verifier with the rows that it judges."""
        for judge in self.judges:
            rows = [i for i, r in enumerate(rollouts) if self._judge_of(r.prompt.source) is judge]
            if rows:
                yield judge, rows


class EnvironmentScorer(Scorer):
    """The config's environment, started at once: it gives the rewards, and no verifier is asked.

    Raises: as `make_environments`.
    """

    def __init__(self, config: FitConfig, output: VerifierOutput | None = None) -> None:
        self._warns = output is None
        self._name = f"environment {environment_name(config.environment)}"
        descriptor = None if output is None else output.descriptor
        self._start = partial(make_environments, config, output=descriptor)
        self._environments = self._start()

    def environments(
        self, *, own: bool = False, num_responses: int | None = None
    ) -> AbstractContextManager[Environments]:
        return closing(self._start()) if own else nullcontext(self._environments)

    def check(self, rollouts: Sequence[Rollout]) -> None:
        if self._warns:
            _check(rollouts, self._name, "they are not trained on")

    def failures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The episodes that the environment failed in, in all and by the kind of failure."""
        kinds = [str(r.failure).partition(":")[0] for r in rollouts if r.is_lost]
        counts = torch.tensor([len(kinds), *map(kinds.count, FAILURES)])
        names = ("episodes", *FAILURES)
        found = zip(names, sum_over_ranks(counts).tolist(), strict=True)
        return {f"rollout/failed_{name}": float(num) for name, num in found}

    def close(self) -> None:
        self._environments.close()


def make_scorer(config: FitConfig, output: VerifierOutput | None = None) -> Scorer:
    """Start what rewards the rollouts of a config's policy.

    Raises: as it.
    """
    kind = EnvironmentScorer if config.environment.is_used else VerifierScorer
    return kind(config, output)


def _make_judge(rewards: RewardConfig, output: VerifierOutput | None) -> OneJudge:
    """Start what judges with one verifier."""
    is_model = isinstance(rewards, RewardModelVerifier)
    return ModelJudge(rewards) if is_model else TextJudge(rewards, output)


def _judged(rollout: Rollout, judge: OneJudge) -> Rollout | None:
    """The rollout with the part of its text that is judged; None: it has no answer."""
    part = judged_part(judge.config, rollout.response_text, rollout.prompt.text)
    return None if part is None else replace(rollout, response_text=part)


def _shown(judge: OneJudge) -> str:
    return f"verifier {getattr(judge.config, 'function', judge.config.verifier)}"


def _check(rollouts: Sequence[Rollout], whose: str, effect: str) -> None:
    failed = [r for r in rollouts if r.failure is not None]
    if not failed:
        return
    first = f"{failed[0].failure}, prompt {failed[0].prompt.prompt_id}"
    if len(failed) == len(rollouts) >= FEWEST_WITHOUT_VERDICT:
        raise UserError(
            f"the {whose} gave no verdict on any of {len(rollouts)} responses; the first: "
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
    """The rollouts with each other's verdicts, of all sources together.

    The negative control `rewards.shuffle`: rewards without a relation to the responses.
    """
    dealt = [
        Verdict(bool(r.is_correct), r.reward, r.extracted, r.failure, r.by_verifier)
        for r in rollouts
    ]
    Random(f"shuffle/{seed}").shuffle(dealt)
    return [verdict.on(rollout) for verdict, rollout in zip(dealt, rollouts, strict=True)]
