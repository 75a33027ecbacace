"""Responses -> verdicts with their rewards, whatever the verifier does, while others are sampled.

`vapo.rollouts.batch` makes tensors of them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from random import Random
from typing import Any

from vapo.config.environments import environment_name
from vapo.config.rewards import RewardModelVerifier
from vapo.config.schema import FitConfig, RewardConfig
from vapo.environments.contract import Environments, EpisodeKey, Reply, Verdict
from vapo.environments.processes import make_environments
from vapo.errors import UserError
from vapo.rewards.reward_model import ModelJudge
from vapo.rewards.text_judge import WAIT_S, TextJudge, rewards_by_source, verdict_fields
from vapo.rewards.verifier_output import VerifierOutput
from vapo.rewards.votes import count_votes
from vapo.system.shown_text import visible
from vapo.types import FinishReason, Prompt, Rollout

Judge = TextJudge | ModelJudge
OnVerdict = Callable[[Verdict], None]

FEWEST_WITHOUT_VERDICT = 8
"""A batch of so many responses without one verdict is the verifier's fault, not the responses'."""

EXTRACTING = ("exact", "regex", "math", "math_verify", "reasoning_gym")
"""Verifiers that extract a response's answer, so that answers can vote."""

logger = logging.getLogger(__name__)


class Scorer(AbstractContextManager["Scorer"]):
    """What answers a policy's turns: the config's verifier, which judges a response, or its
    environment. Each source of a mixture has a verifier of its own.

    A verifier that hangs, crashes, raises or returns NaN costs that response a verdict with
    `failure` set (incorrect, the configured incorrect reward); it ends the run only where a
    batch has no verdict at all, from which nothing could be learnt. Each verifier in use has
    `num_workers` processes.

    Episodes have their rewards from the environment, which is started at once, and no verifier is
    asked.

    With `output`, which is for somebody who looks at each verdict, it has what the verifiers
    print, and failures are neither warned of nor counted.

    Raises: UserError: a setting is missing or unusable, a verifier cannot be imported; and as
        `make_environments`.
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
        self._environments: Environments | None = None
        if config.environment.is_used:
            self._name = f"environment {environment_name(config.environment)}"
            descriptor = None if output is None else output.descriptor
            self._start_environments = partial(make_environments, config, output=descriptor)
            self._environments = self._start_environments()
            return
        by_source = rewards_by_source(rewards, config.data)
        if all(own is rewards for own in by_source.values()):
            by_source = {"": rewards}
        self.by_source: dict[str, Judge] = {}
        try:
            for source, own in by_source.items():
                same = [judge for judge in self.judges if judge.config == own]
                if not same:
                    is_model = isinstance(own, RewardModelVerifier)
                    same = [ModelJudge(own) if is_model else TextJudge(own, output)]
                    self.judges += same
                self.by_source[source] = same[0]
        except BaseException:
            self.close()
            raise

    def environments(
        self, *, own: bool = False, num_responses: int | None = None
    ) -> AbstractContextManager[Environments]:
        """What answers the turns of a loop: the verifiers, or the environment.

        Args:
            own: another loop may be open at the same time, in a thread that waits for this one.
            num_responses: of a batch; a reward model judges so many together at the latest, else
                when there is nothing to sample.
        """
        if self._environments is None:
            return closing(JudgedResponses(self, num_responses))
        if own:
            return closing(self._start_environments())
        return nullcontext(self._environments)

    def submit(
        self, rollout: Rollout, on_verdict: OnVerdict, *, num_responses: int | None = None
    ) -> Callable[[], object]:
        """Ask for a verdict, which `pump` hands out; what is returned withdraws the question."""
        prompt, judge = rollout.prompt, self._judge_of(rollout.prompt.source)
        on_reply = partial(_hand_out, judge.config, on_verdict)
        if isinstance(judge, ModelJudge):
            return judge.submit(rollout, on_reply, num_responses)
        return judge.submit((rollout.response_text, prompt.answer, prompt.metadata), on_reply)

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
        """Warn of responses of a batch that a verifier, or their environment, failed on.

        Raises: UserError: on all of them, which is not the responses' fault.
        """
        if not self._warns:
            return
        if self._environments is not None:
            _check(rollouts, self._name, "they are not trained on")
        for judge, rows in self._shares(rollouts):
            whose = f"verifier {getattr(judge.config, 'function', judge.config.verifier)}"
            _check([rollouts[row] for row in rows], whose, "counted as incorrect")

    def extracts_answers(self, source: str = "") -> bool:
        """Whether this source's verifier extracts a response's answer, so that answers can vote."""
        if self._environments is not None:
            return False
        return self._judge_of(source).config.verifier in EXTRACTING

    def votes(self, rollouts: Sequence[Rollout], *, group_size: int) -> list[int | None]:
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
                group_size=group_size,
                pool=judge.pool if judge.config.verifier == "math" else None,
            )
            for row, vote in zip(rows, found, strict=True):
                votes[row] = vote
        return votes

    def close(self) -> None:
        """End verifier processes and environments; a second call does nothing."""
        if self._environments is not None:
            self._environments.close()
        for judge in self.judges:
            judge.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge_of(self, source: str) -> Judge:
        return self.by_source[""] if "" in self.by_source else self.by_source[source]

    def _shares(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[Judge, list[int]]]:
        """Each verifier with the rows that it judges."""
        for judge in self.judges:
            rows = [i for i, r in enumerate(rollouts) if self._judge_of(r.prompt.source) is judge]
            if rows:
                yield judge, rows


def _hand_out(config: RewardConfig, on_verdict: OnVerdict, reply: dict[str, Any]) -> None:
    on_verdict(Verdict(**verdict_fields(config, reply)))


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
    dealt = [Verdict(bool(r.is_correct), r.reward, r.extracted, r.failure) for r in rollouts]
    Random(f"shuffle/{seed}").shuffle(dealt)
    return [verdict.on(rollout) for verdict, rollout in zip(dealt, rollouts, strict=True)]


class JudgedResponses:
    """Verifiers as `Environments` of one turn: a response is judged while others are sampled.

    A response that was cut is judged, too. All may be open at a time: those that no process judges
    yet wait. The verifiers stay when it is closed: others may ask them.
    """

    gives_verdicts = True
    capacity = sys.maxsize

    def __init__(self, scorer: Scorer, num_responses: int | None = None) -> None:
        self._scorer, self._num_responses = scorer, num_responses
        self._prompts: dict[EpisodeKey, Prompt] = {}
        self._asked: dict[EpisodeKey, Callable[[], object]] = {}
        self._replies: list[Reply] = []

    def reset(self, key: EpisodeKey, prompt: Prompt) -> None:
        self._prompts[key] = prompt
        self._replies.append(Reply(key, observation=""))

    def step(self, key: EpisodeKey, text: str, *, has_ended: bool = True) -> None:
        reason = FinishReason.STOP if has_ended else FinishReason.LENGTH
        response = Rollout(self._prompts[key], (), text, (), reason)
        self._asked[key] = self._scorer.submit(
            response,
            lambda verdict: self._replies.append(Reply(key, verdict=verdict)),
            num_responses=self._num_responses,
        )

    def end(self, key: EpisodeKey) -> None:
        self._prompts.pop(key, None)
        if (withdraw := self._asked.pop(key, None)) is not None:
            withdraw()

    def poll(self, timeout_s: float) -> list[Reply]:
        self._scorer.pump(0.0 if self._replies else timeout_s)
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        for key in list(self._asked):
            self.end(key)
