"""Responses -> verdicts with their rewards, whatever the verifier does, while others are sampled.

`vapo.rollouts.batch` makes tensors of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import Any

from vapo.config.environments import EnvironmentConfig, environment_name
from vapo.config.rewards import RewardModelVerifier
from vapo.config.schema import DataConfig, FitConfig, RewardConfig
from vapo.environments.contract import Environments, Verdict
from vapo.environments.judged_responses import JudgedResponses, OnVerdict
from vapo.environments.processes import make_environments
from vapo.errors import UserError
from vapo.rewards.reward_model import ModelJudge
from vapo.rewards.text_judge import (
    TextJudge,
    rewards_by_source,
    verdict_fields,
)
from vapo.rewards.verifier_output import VerifierOutput
from vapo.rewards.votes import count_votes
from vapo.rewards.worker_pool import WAIT_S
from vapo.system.shown_text import visible
from vapo.types import Rollout

Judge = TextJudge | ModelJudge

FEWEST_WITHOUT_VERDICT = 8
"""A batch of so many responses without one verdict is the verifier's fault, not the responses'."""

EXTRACTING = ("exact", "regex", "math", "math_verify", "reasoning_gym")
"""Verifiers that extract a response's answer, so that answers can vote."""

logger = logging.getLogger(__name__)


class Scorer(AbstractContextManager["Scorer"]):
    """What answers a policy's turns: the configured verifier, which judges a response, or the
    environment. With `data`, each source of a mixture has a verifier of its own.

    A verifier that hangs, crashes, raises or returns NaN costs that response a verdict with
    `failure` set (incorrect, the configured incorrect reward); it ends the run only where a
    batch has no verdict at all, from which nothing could be learnt. Each verifier in use has
    `num_workers` processes.

    With `start_environments` episodes have their rewards from the `environment`, and no verifier
    is asked; it is started at once.

    With `output`, which is for somebody who looks at each verdict, it has what the verifiers
    print, and failures are neither warned of nor counted.

    Raises:
        UserError: a setting is missing or unusable, or a verifier cannot be imported.
    """

    _warns = True

    def __init__(
        self,
        rewards: RewardConfig,
        *,
        max_response_tokens: int,
        data: DataConfig | None = None,
        output: VerifierOutput | None = None,
        environment: EnvironmentConfig | None = None,
        start_environments: Callable[[], Environments] | None = None,
    ) -> None:
        overlong = rewards.overlong
        ramp_tokens = overlong.ramp_tokens(max_response_tokens)
        if overlong.soft_punishment and ramp_tokens > max_response_tokens:
            raise UserError(
                f"rewards.overlong.cache_tokens is {ramp_tokens}, above "
                f"max_response_tokens, {max_response_tokens}: every response would be punished"
            )
        self.judges: list[Judge] = []
        self._warns = output is None  # else every failure is shown beside its response
        self._environment = environment
        self._environments: Environments | None = None
        if start_environments is not None:
            self._start_environments = start_environments
            self._environments = start_environments()
            return
        by_source = {} if data is None else rewards_by_source(rewards, data)
        if all(own is rewards for own in by_source.values()):
            by_source = {"": rewards}
        self.by_source: dict[str, Judge] = {}
        try:
            for source, config in by_source.items():
                same = [judge for judge in self.judges if judge.config == config]
                self.judges += [] if same else [_judge(config, output)]
                self.by_source[source] = same[0] if same else self.judges[-1]
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
        judge = self._judge_of(rollout.prompt.source)
        on_reply = partial(_hand_out, judge.config, on_verdict)
        if isinstance(judge, ModelJudge):
            return judge.submit(rollout, on_reply, num_responses)
        prompt = rollout.prompt
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
        if self._environments is not None and self._environment is not None:
            whose = f"environment {environment_name(self._environment)}"
            _check(rollouts, whose, "they are not trained on")
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


def scorer_of(config: FitConfig, output: VerifierOutput | None = None) -> Scorer:
    """The scorer of a run: its verifiers, or its environment.

    Raises: UserError as `Scorer`, and as `make_environments`.
    """
    descriptor = None if output is None else output.descriptor
    start = partial(make_environments, config, output=descriptor)
    return Scorer(
        config.rewards,
        max_response_tokens=config.rollouts.max_response_tokens,
        data=config.data,
        output=output,
        environment=config.environment,
        start_environments=start if config.environment.is_used else None,
    )


def _hand_out(config: RewardConfig, on_verdict: OnVerdict, reply: dict[str, Any]) -> None:
    on_verdict(Verdict(**verdict_fields(config, reply)))


def _judge(rewards: RewardConfig, output: VerifierOutput | None) -> Judge:
    if isinstance(rewards, RewardModelVerifier):
        return ModelJudge(rewards, rewards.reward_model_path, rewards.reward_model_threshold)
    return TextJudge(rewards, output)


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
