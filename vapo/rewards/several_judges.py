"""Several verifiers for one response: their rewards are summed, each times its weight.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from vapo.config.rewards import SeveralVerifiers, rewards_of_each
from vapo.config.schema import RewardConfig
from vapo.errors import about
from vapo.rewards.text_judge import WAIT_S, OnReply, verdict_fields
from vapo.user_code.process_protocol import MAX_REWARD

Withdraw = Callable[[], object]


class SingleJudge(Protocol):
    """A judge with one verifier."""

    @property
    def config(self) -> RewardConfig: ...

    def poll(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


_J = TypeVar("_J", bound=SingleJudge)


class SeveralJudges(Generic[_J]):
    """Asks each of several judges about a response, and replies once all have answered.

    If one verifier fails, the response counts as incorrect for that verifier alone, whose verdict
    has the `failure`.

    Args:
        judges: one judge for each name in `rewards.verifiers`.
    """

    def __init__(self, rewards: RewardConfig, judges: Mapping[str, _J]) -> None:
        assert isinstance(rewards, SeveralVerifiers)
        self.config: RewardConfig = rewards
        self.judges, self._deciding = judges, rewards.deciding
        self._weights = {name: block.weight for name, block in rewards.verifiers.items()}

    @property
    def deciding(self) -> _J:
        """The judge that decides whether the response is correct."""
        return self.judges[self._deciding]

    def submit(self, ask: Callable[[_J, OnReply], Withdraw], on_reply: OnReply) -> Withdraw:
        """Ask all judges about one response, each by `ask(judge, on_its_reply)`.

        Returns: a function that withdraws the questions.
        """
        by_verifier: dict[str, dict[str, Any]] = {}

        def on_judge_reply(name: str, reply: dict[str, Any]) -> None:
            by_verifier[name] = self._verdict(name, reply)
            if len(by_verifier) == len(self.judges):
                on_reply(self._combined(by_verifier))

        withdrawals = [
            ask(judge, partial(on_judge_reply, name)) for name, judge in self.judges.items()
        ]

        def withdraw() -> None:
            for withdraw_question in withdrawals:
                withdraw_question()

        return withdraw

    def poll(self, timeout_s: float) -> None:
        """See `WorkerPool.poll`. Each judge is polled for an equal share of the time."""
        for judge in self.judges.values():
            judge.poll(timeout_s / len(self.judges))

    def close(self) -> None:
        for judge in self.judges.values():
            judge.close()

    def _verdict(self, name: str, reply: dict[str, Any]) -> dict[str, Any]:
        """The fields of one verifier's verdict. It is a failure if the weighted reward is above
        that verifier's share of `MAX_REWARD`, so that the sum is within that limit."""
        config, max_share = self.judges[name].config, MAX_REWARD / len(self.judges)
        fields = verdict_fields(config, reply)
        if abs(self._weights[name] * fields["reward"]) <= max_share:
            return fields
        failure = f"error: the reward {fields['reward']:g} times its weight is above {max_share:g}"
        return verdict_fields(config, {"failure": failure})

    def _combined(self, by_verifier: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """The deciding verifier's verdict with the weighted sum of all rewards."""
        in_order = {name: by_verifier[name] for name in self.judges}
        reward = sum(self._weights[name] * verdict["reward"] for name, verdict in in_order.items())
        return in_order[self._deciding] | {"reward": reward, "by_verifier": in_order}


def one_or_several(
    rewards: RewardConfig, make_judge: Callable[[RewardConfig], _J]
) -> _J | SeveralJudges[_J]:
    """Start the judge of `rewards`, or those of its several verifiers.

    Raises: UserError: as `make_judge`, with the verifier's key; all started judges are then closed.
    """
    if not isinstance(rewards, SeveralVerifiers):
        return make_judge(rewards)
    judges: dict[str, _J] = {}
    try:
        for name, rewards_of_one in rewards_of_each(rewards).items():
            with about(f"rewards.verifiers.{name}"):
                judges[name] = make_judge(rewards_of_one)
    except BaseException:
        for judge in judges.values():
            judge.close()
        raise
    return SeveralJudges(rewards, judges)


def reply_of(
    judge: _J | SeveralJudges[_J], ask: Callable[[_J, OnReply], Withdraw]
) -> dict[str, Any]:
    """Wait for the reply about one response; each judge is asked by `ask(judge, on_reply)`."""
    replies: list[dict[str, Any]] = []
    if isinstance(judge, SeveralJudges):
        judge.submit(ask, replies.append)
    else:
        ask(judge, replies.append)
    while not replies:
        judge.poll(WAIT_S)
    return replies[0]
